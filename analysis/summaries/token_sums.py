"""Sum a part's rows by token over documents: the sums behind standard errors that are clustered by document. And find
the tokens that fire most neurons, and where.

With a token's count n_g and its nnz y_g in each document g (`documents` says what that is): Σ n_g, Σ n_g², Σ y_g, Σ
y_g², Σ y_g n_g (see `statistics.ratio_error`), by layer and of the sum over layers, as integers, so that they add up
over parts; `z_scores` has those of z. Rows are sorted once by token and document, and added up a few groups at a time.
Cost for 1 M tokens of 28 layers: 0.5 CPU seconds.

Rows with `flagged` true hold what flagged tokens add to each sum. A sum of squares over documents has no share of its
own for them: there it is the sum over all tokens less that over unflagged ones.

What is highest in a run is highest in its part too, so the highest places of parts are joined, and cut again.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from twell.analysis.engines.accumulate import Tables
from twell.analysis.engines.layer_columns import TOTAL, is_layer_column, layer_columns
from twell.analysis.summaries.part_rows import BLOCK, PartRows, different_sequences, grouped, groups
from twell.workbench.run.columns import LOSS_UNITS_PER_NAT
from twell.workbench.run.tables.highest import HIGHEST_TOKENS

MOST = 2.0**63
FIRST = 64 * HIGHEST_TOKENS  # rows of greatest value among which different tokens are sought first
RISING = {"layer": True, "phase": True, "nnz": False, "sequence": True, "position": True}


TokenSums = dict[str, NDArray]  # by token: token_id, and what adds up


def clustered(rows: PartRows, sums: Callable[[NDArray, NDArray, NDArray], TokenSums]) -> pa.Table:
    """Return sums over documents by token: over unflagged tokens, and what flagged ones add to them.

    sums: a function of row indices, sorted by token and then document; of where each group of one token and document
    starts among them; and of which rows count. It returns every token's sums.
    """
    order, starts = groups(rows.token, rows.cluster)
    unflagged = rows.flags[order] == 0
    base = sums(order, starts, unflagged)
    # A group without flagged tokens adds nothing to their sums, so these are taken over the other groups alone.
    sizes = np.diff(starts, append=len(order))
    has_flagged = ~np.logical_and.reduceat(unflagged, starts)
    in_subset = np.repeat(has_flagged, sizes)
    subset, subset_starts = order[in_subset], np.cumsum(sizes[has_flagged]) - sizes[has_flagged]
    with_flagged = sums(subset, subset_starts, np.ones(len(subset), bool))
    without = sums(subset, subset_starts, unflagged[in_subset])
    token_id = with_flagged["token_id"]
    added = {name: values - without[name] for name, values in with_flagged.items() if name != "token_id"}
    added["token_id"] = token_id
    occurs = np.isin(base["token_id"], rows.token[rows.flags == 0])
    columns = {name: np.concatenate([values[occurs], added[name]]) for name, values in base.items()}
    return pa.table({**columns, "flagged": np.repeat([False, True], [occurs.sum(), len(token_id)])})


def firsts(token: NDArray) -> NDArray:
    """Return where each run of equal tokens starts."""
    return np.flatnonzero(np.diff(token, prepend=-1))


def tokens(rows: PartRows, over_layers: NDArray) -> Tables:
    """Return the summaries `tokens` and, with one column a layer, `token_layers` of some whole sequences.

    over_layers: nnz of each row, summed over layers. OverflowError where a sum of squares is past 64 bits.
    """
    table = clustered(rows, _Wide(rows, over_layers).sums)
    by_layer = [name for name in table.schema.names if is_layer_column(name)]
    return {"tokens": table.drop(by_layer), "token_layers": table.select(["token_id", "flagged", *by_layer])}


class _Wide:
    """Rows to be added up by token, with the losses of predictions made at them and of the tokens themselves."""

    def __init__(self, rows: PartRows, over_layers: NDArray) -> None:
        self.rows, self.over_layers = rows, over_layers
        finite = np.isfinite(rows.loss)
        units = np.rint(np.where(finite, rows.loss, 0) * LOSS_UNITS_PER_NAT).astype(np.int64)
        follows = rows.follow()[1:]
        own, own_finite = np.zeros_like(units), np.zeros_like(finite)
        own[1:], own_finite[1:] = np.where(follows, units[:-1], 0), follows & finite[:-1]
        self.losses = {
            "loss_sum": units,
            "loss_tokens": finite.astype(np.int64),
            "surprisal_sum": own,
            "surprisal_tokens": own_finite.astype(np.int64),
        }

    def sums(self, order: NDArray, starts: NDArray, counted: NDArray) -> TokenSums:
        """Return the sums of some rows; arguments as `clustered` passes them."""
        weight, ids = counted.astype(np.int64), self.rows.token[order[starts]]
        first = firsts(ids)
        n = np.add.reduceat(weight, starts)
        sums = {
            "token_id": ids[first],
            "tokens": np.add.reduceat(n, first),
            "sequences": different_sequences(self.rows.sequence[order], starts[first], counted),
            "tokens_square": np.add.reduceat(n * n, first),
            "clusters": np.add.reduceat((n > 0).astype(np.int64), first),
        }
        for name, values in self.losses.items():
            sums[name] = np.add.reduceat(values[order] * weight, starts[first])
        token = np.repeat(np.arange(len(first)), np.diff(first, append=len(starts)))
        names = ("nnz_sum", "nnz_square", "nnz_cross")
        for name, nnz in zip(names, self._nnz(order, starts, weight, token, n), strict=True):
            sums |= {name: nnz[:, -1], **layer_columns(name, nnz[:, :-1])}
        return sums

    def _nnz(self, order: NDArray, starts: NDArray, weight: NDArray, token: NDArray, n: NDArray) -> list[NDArray]:
        """Return Σ y_g, Σ y_g², Σ y_g n_g [token, layer], the sum over layers in the last column.

        weight: 1 for rows that count, else 0; token: of each group, as an index; n: rows that count in each group.
        """
        layers, ends = self.rows.counts.shape[1], np.append(starts, len(order))
        totals = [np.zeros((1 + int(token.max(initial=-1)), layers + 1), np.int64) for _ in range(3)]
        rough = np.zeros(len(totals[0]))
        bounds = np.unique(np.append(np.searchsorted(starts, np.arange(0, len(order), BLOCK)), len(starts)))
        buffer = np.empty((np.diff(ends[bounds]).max(initial=0), layers + 1), np.int64)
        for low, high in pairwise(bounds):
            rows = order[ends[low] : ends[high]]
            values = buffer[: len(rows)]
            values[:, :layers] = self.rows.counts.take(rows, axis=0)
            values[:, layers] = self.over_layers[rows]
            group = np.repeat(np.arange(high - low), np.diff(ends[low : high + 1]))
            y = grouped(group, values, high - low, weight[ends[low] : ends[high]])
            index = token[low:high] - token[low]
            size = int(index[-1]) + 1
            span = slice(token[low], token[low] + size)
            rough[span] += np.bincount(index, np.square(y[:, layers].astype(float)), size)
            squares = np.multiply(y, y, out=buffer[: len(y)])
            for sums, each, times in zip(totals, (y, squares, y), (None, None, n[low:high]), strict=True):
                sums[span] += grouped(index, each, size, times)
        if rough.max(initial=0) >= MOST:
            raise OverflowError("Expected sums of squared nnz below 2^63, got a token that fires too many neurons.")
        return totals


def highest(rows: PartRows, over_layers: NDArray) -> pa.Table:
    """Return the summary `highest` of some rows. over_layers: nnz of each row, summed over layers"""
    unflagged, keys, found = rows.flags == 0, list[tuple[int, int, int]](), [np.empty(0, np.int64)]
    for phase in np.unique(rows.phase[unflagged]):
        used = np.flatnonzero(unflagged & (rows.phase == phase))
        token = rows.token[used]
        for layer in range(TOTAL, rows.counts.shape[1]):
            nnz = over_layers if layer == TOTAL else rows.counts[:, layer]
            found.append(used[fullest(nnz[used], token)])
            keys.append((layer, int(phase), len(found[-1])))
    index, (layers, phases, sizes) = np.concatenate(found), np.array(keys, np.int32).reshape(-1, 3).T
    of_layer = np.repeat(layers, sizes)
    return pa.table(
        {
            "layer": of_layer,
            "phase": np.repeat(phases, sizes),
            "sequence": rows.sequence[index],
            "position": rows.position[index],
            "token_id": rows.token[index],
            "nnz": np.where(of_layer == TOTAL, over_layers[index], rows.counts[index, of_layer]).astype(np.int64),
        }
    )


def fullest(nnz: NDArray, token: NDArray) -> NDArray:
    """Return the indices of the rows of greatest nnz, of each token the first, up to HIGHEST_TOKENS.

    nnz, token [row]: in the order of the text, by which those that are alike are ordered.
    """
    size = FIRST
    while True:  # until there are enough different tokens among the rows of greatest nnz
        index = greatest(nnz, size)
        first = np.sort(np.unique(token[index], return_index=True)[1])[:HIGHEST_TOKENS]
        if len(first) == HIGHEST_TOKENS or size >= len(nnz):
            return index[first]
        size *= 16


def greatest(values: NDArray, size: int) -> NDArray:
    """Return the indices of the greatest values, falling, as many as `size`; those that are alike in the order given"""
    index = np.arange(len(values))
    if size < len(values):
        least = np.partition(values, -size)[-size]
        above = np.flatnonzero(values > least)
        index = np.concatenate([above, np.flatnonzero(values == least)[: size - len(above)]])
    return index[np.argsort(-values[index].astype(float), kind="stable")]


def highest_of(table: pa.Table) -> pa.Table:
    """Return the highest places of a run among those of its parts, as the summary `highest` has them."""
    rows = table.to_pandas().sort_values([*RISING], ascending=[*RISING.values()])
    rows = rows.drop_duplicates(["layer", "phase", "token_id"]).groupby(["layer", "phase"]).head(HIGHEST_TOKENS)
    return pa.Table.from_pandas(rows, table.schema, preserve_index=False)
