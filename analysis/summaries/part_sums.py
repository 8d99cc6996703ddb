"""Sum over a part's tokens, in numpy: the histograms, sums and counts behind most tables.

Each adds up over parts, because each document is summed in one of them, wherever its rows lie (`documents`). All
are integers, so that they come out the same in any order and on any engine. `part_rows` reads the tokens, `rank_tables`
counts what rank correlations come from, `token_sums` sums by token. Cost, 1 M tokens of 28 layers: 0.5 CPU seconds.

Flagged tokens: rows with `flagged` true hold what those tokens add to each sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from twell.analysis.engines.accumulate import Tables, Total
from twell.analysis.engines.layer_columns import TOTAL, layer_columns
from twell.analysis.statistics import band, distinct
from twell.analysis.summaries.documents import REPLICATES, Documents, SplitDocuments
from twell.analysis.summaries.part_rows import BLOCK, READ, KeySums, PartRows, add_rows, covered_pieces, grouped, pieces
from twell.analysis.summaries.rank_tables import LOSS_SCALE, entropy_ranks, ranks, ranks_by_class
from twell.analysis.summaries.token_class import CLASSES, Classes
from twell.analysis.summaries.token_sums import highest, tokens
from twell.workbench.run.columns import LOSS_UNITS_PER_NAT
from twell.workbench.run.part_files import open_part
from twell.workbench.run.schema import FLAG_NOT_FINITE, SUMMARIES

ORIGIN, ORIGIN_SIZES = ("source", "phase", "place"), (2, 4, REPLICATES)  # sizes: of all but the first, and replicates
ORIGINS = prod(ORIGIN_SIZES)


def of_part(
    path: Path,
    counts: Sequence[str],
    used: Sequence[str],
    classes: Classes,
    step: int,
    documents: Documents,
    split: SplitDocuments,
) -> Tables:
    """Return the sums of one part by the name of the summary, some with one column a layer (see `layer_columns`).

    counts, used: the names of the part's columns of layers; classes: of the vocabulary; step:
    rank correlations count 20 documents in every 20 · `step`; documents: of the run; split: those that lie in several
    parts. What sums on disk hold of such a document is taken away, since it is summed anew and whole.
    """
    total = Total()
    for rows in pieces(path, counts, documents, split):
        total.add(of_rows(rows, classes, step))
    for rows in covered_pieces(path, counts, documents, split):
        sums = of_rows(rows, classes, step)
        del sums["highest"]  # a place that is found again is the same place
        total.add({name: negated(name, table) for name, table in sums.items()})
    if used:
        total.add({"used": of_used(path, used)})
    return total.tables()


def of_rows(rows: PartRows, classes: Classes, step: int) -> Tables:
    """Return the sums of rows that are whole documents, except the table `used`; arguments as in `of_part`."""
    bins = loss_bins(rows.loss)
    own_bins = np.where(rows.follow(), np.append(-1, bins[:-1]), -1)
    kind = classes.of_rows(rows.token, rows.sequence)
    sums, over_layers = _by_key(rows, bins, kind)
    in_ranks = (rows.unit // REPLICATES) % step == 0  # whole groups, so that no replicate is left empty
    subset, losses = rows.take(in_ranks), {"later": bins[in_ranks], "own": own_bins[in_ranks]}
    if np.isfinite(subset.entropy).any():
        sums["entropy_ranks"] = entropy_ranks(
            subset, subset.unit % REPLICATES, losses["later"], loss_bins(subset.entropy)
        )
    return {
        **sums,
        "layers": _layers(rows, over_layers),
        "surprisal_ranks": ranks(subset, subset.unit % REPLICATES, losses["later"]),
        "surprisal_classes": ranks_by_class(subset, losses, kind[in_ranks]),
        **tokens(rows, over_layers),
        "highest": highest(rows, over_layers),
    }


def negated(name: str, table: pa.Table) -> pa.Table:
    """Return the sums of a summary with the opposite sign, under the same keys."""
    keys = SUMMARIES.tables[name].keys
    return pa.table(
        {column: table[column] if column in keys else pc.negate(table[column]) for column in table.schema.names}
    )


def loss_bins(loss: NDArray) -> NDArray:
    """Return floor(24·√loss) of each row, -1 where it has no loss; of entropies alike."""
    finite = np.isfinite(loss)
    return np.where(finite, np.floor(np.sqrt(np.where(finite, loss, 0)) * LOSS_SCALE), -1).astype(np.int32)


def _by_key(rows: PartRows, bins: NDArray, kind: NDArray) -> tuple[Tables, NDArray]:
    """Return the sums by position, band of positions, band of loss, origin and class; and each row's sum over layers.

    Position 0 is always flagged, and counts as unflagged by position and by origin unless it is not finite: it stands
    apart by its number there.
    """
    unflagged, replicate, step = rows.flags == 0, rows.unit % REPLICATES, band(rows.position)
    steps, levels, sources = 1 + int(step.max()), 1 + max(int(bins.max()), 0), 1 + int(rows.source.max())
    by_band = KeySums(rows, replicate * steps + step, REPLICATES * steps, unflagged & (rows.position > 0))
    by_loss = KeySums(rows, replicate * levels + np.maximum(bins, 0), REPLICATES * levels, unflagged & (bins >= 0))
    in_positions = unflagged | ((rows.position == 0) & (rows.flags & FLAG_NOT_FINITE == 0))
    by_position = _position_sums(rows, in_positions)
    of_class, kinds = kind * REPLICATES + replicate, len(CLASSES) * REPLICATES
    by_class = {
        name: KeySums(rows, of_class, kinds, unflagged, square=name == "nnz_square")
        for name in ("nnz_sum", "nnz_square")
    }
    origin = np.ravel_multi_index(
        (*(getattr(rows, name) for name in ORIGIN), replicate), (sources, *ORIGIN_SIZES), mode="clip"
    )
    by_origin = KeySums(rows, origin, sources * ORIGINS, in_positions)
    over_layers = add_rows(rows, (by_band, by_loss, by_origin, *by_class.values(), *by_position.values()))
    flagged = rows.take(~in_positions)
    by_flagged = _position_sums(flagged, np.ones(len(flagged), bool))
    add_rows(flagged, list(by_flagged.values()))
    squares = _document_squares(rows, over_layers, by_position)
    positions = [
        _position_table(by_position, False, squares),
        _position_table(by_flagged, True, {name: np.zeros_like(each) for name, each in squares.items()}),
    ]
    tables = {
        "position_bands": _two_key_table(("replicate", "band"), steps, by_band, total=True),
        "surprisal": _two_key_table(("replicate", "loss_bin"), levels, by_loss, total=False),
        "positions": pa.concat_tables(positions),
        "origins": _origin_table(rows, by_origin),
        "class_layers": _class_table(by_class),
    }
    return tables, over_layers


def _origin_table(rows: PartRows, sums: KeySums) -> pa.Table:
    """Return tokens, losses and nnz by origin, as the summary `origins` has them; `source` is a number here."""
    tokens = sums.tokens()
    key, shape = np.flatnonzero(tokens), (len(tokens) // ORIGINS, *ORIGIN_SIZES)
    keys = dict(zip((*ORIGIN, "replicate"), np.unravel_index(key, shape), strict=True))
    known = sums.counted & np.isfinite(rows.loss)
    units = np.rint(rows.loss[known] * LOSS_UNITS_PER_NAT)  # whole numbers, exact in float64 up to 2^53
    losses = {
        "loss_sum": np.bincount(sums.key[known], units, len(tokens))[key].astype(np.int64),
        "loss_tokens": np.bincount(sums.key[known], minlength=len(tokens))[key],
    }
    return pa.table(
        {**keys, "tokens": tokens[key], **losses, **layer_columns("nnz_sum", sums.sums[key, :-1], sums.sums[key, -1])}
    )


def _class_table(sums: Mapping[str, KeySums]) -> pa.Table:
    """Return tokens and sums of nnz by class and replicate, as `class_layers` has them; `class` is a number here."""
    tokens = sums["nnz_sum"].tokens()
    key = np.flatnonzero(tokens)
    keys = dict(zip(("class", "replicate"), np.divmod(key, REPLICATES), strict=True))
    columns = [layer_columns(name, each.sums[key, :-1]) for name, each in sums.items()]
    return pa.table({**keys, "tokens": tokens[key], **columns[0], **columns[1]})


def _document_squares(rows: PartRows, over_layers: NDArray, sums: Mapping[str, KeySums]) -> dict[str, NDArray]:
    """Return, by position, Σ n_g² and how many documents g reach it, and by position and layer, the sum over layers in
    the last column, Σ y_g² and Σ y_g n_g, n_g and y_g being a document's tokens and nnz there.

    Those of a document of one sequence stand in `sums` already; the others are added up some at a time.
    """
    single, counted = sums["nnz_sum"], sums["nnz_sum"].counted
    n = single.tokens()
    n2, g, y2, yn = n.copy(), n.copy(), sums["nnz_square"].sums.copy(), single.sums.copy()
    _, cluster = distinct(rows.cluster)
    begins = np.flatnonzero(np.diff(rows.sequence, prepend=-1))
    inside = np.flatnonzero((np.bincount(cluster[begins]) > 1)[cluster])
    if (np.diff(cluster) < 0).any():  # documents whose sequences stand between those of others
        inside = inside[np.argsort(cluster[inside], kind="stable")]
    _, cluster = distinct(cluster[inside])
    starts = np.append(np.flatnonzero(np.diff(cluster, prepend=-1)), len(inside))
    bounds = np.unique(np.append(np.searchsorted(starts[:-1], np.arange(0, len(inside), BLOCK)), len(starts) - 1))
    for low, high in pairwise(bounds):
        chosen = inside[starts[low] : starts[high]]
        span = 1 + int(rows.position[chosen].max())
        key = (cluster[starts[low] : starts[high]] - low) * span + rows.position[chosen]
        values = np.concatenate([rows.counts[chosen], over_layers[chosen, None]], axis=1, dtype=np.int64)
        weight, shape = counted[chosen].astype(np.int64), (high - low, span)
        here = np.bincount(key, weight, (high - low) * span).astype(np.int64)
        y = grouped(key, values, len(here), weight)
        n2[:span] += (here * here - here).reshape(shape).sum(axis=0)
        g[:span] += (np.minimum(here, 1) - here).reshape(shape).sum(axis=0)
        yn[:span] += (y * (here - 1)[:, None]).reshape(*shape, -1).sum(axis=0)
        y2[:span] += np.square(y, out=y).reshape(*shape, -1).sum(axis=0)
        y2[:span] -= grouped(rows.position[chosen], np.square(values, out=values), span, weight)
    return {"clusters": g, "clusters_tokens_square": n2, "clusters_nnz_square": y2, "clusters_cross": yn}


def _position_sums(rows: PartRows, counted: NDArray) -> dict[str, KeySums]:
    """Return empty sums of nnz and of its square by position."""
    size = 1 + int(rows.position.max(initial=0))
    return {
        "nnz_sum": KeySums(rows, rows.position, size, counted),
        "nnz_square": KeySums(rows, rows.position, size, counted, square=True),
    }


def _position_table(sums: Mapping[str, KeySums], flagged: bool, squares: Mapping[str, NDArray]) -> pa.Table:
    """Return the sums of each position that occurs, as the summary `positions` has them; squares: over documents."""
    tokens = sums["nnz_sum"].tokens()
    position = np.flatnonzero(tokens)
    columns = {"position": position, "tokens": tokens[position], "flagged": np.full(len(position), flagged)}
    for name, each in {**{name: each.sums for name, each in sums.items()}, **squares}.items():
        rows = each[position]
        columns |= {name: rows} if rows.ndim == 1 else layer_columns(name, rows[:, :-1], rows[:, -1])
    return pa.table(columns)


def _two_key_table(names: tuple[str, str], size: int, sums: KeySums, total: bool) -> pa.Table:
    """Return the sums of each pair of keys that occurs; their key is the first times `size` and the second.

    total: whether the sum over layers is in the table too.
    """
    tokens = sums.tokens()
    key = np.flatnonzero(tokens)
    layers, over_layers = sums.sums[key, :-1], sums.sums[key, -1]
    keys = dict(zip(names, np.divmod(key, size), strict=True))
    return pa.table({**keys, "tokens": tokens[key], **layer_columns("nnz_sum", layers, over_layers if total else None)})


def _layers(rows: PartRows, over_layers: NDArray) -> pa.Table:
    """Return the histogram of nnz in each layer, and of their sum."""
    flagged = np.flatnonzero(rows.flags)
    all_rows, flagged_rows = _histograms(rows, over_layers), _histograms(rows.take(flagged), over_layers[flagged])
    tables = []
    for index, (unflagged, extra) in enumerate(zip(all_rows, flagged_rows, strict=True)):
        unflagged[: len(extra)] -= extra
        layer = index if index < rows.counts.shape[1] else TOTAL
        for flag, histogram in ((False, unflagged), (True, extra)):
            nnz = np.flatnonzero(histogram)
            columns = {"nnz": nnz, "tokens": histogram[nnz], "flagged": np.full(len(nnz), flag)}
            tables.append(pa.table({"layer": np.full(len(nnz), layer), **columns}))
    return pa.concat_tables(tables)


def _histograms(rows: PartRows, over_layers: NDArray) -> list[NDArray]:
    """Return how many rows have each count: a histogram a layer, and last that of their sum."""
    layers, size = rows.counts.shape[1], 1 + int(rows.counts.max(initial=0))
    histograms = np.zeros((layers, size), np.int64)
    for low in range(0, len(rows), BLOCK):
        counts = rows.counts[low : low + BLOCK]
        for layer in range(layers):
            histograms[layer] += np.bincount(counts[:, layer], minlength=size)
    return [*histograms, np.bincount(over_layers)]


def of_used(path: Path, names: Sequence[str]) -> pa.Table:
    """Return, for unflagged and flagged tokens, how many there are, and a layer's sum of how many fired neurons have a
    product that is not zero; `names`: the part's columns of layers."""
    tokens, sums = np.zeros(2, np.int64), np.zeros((2, len(names)), np.int64)
    for batch in open_part(path).iter_batches(READ, columns=["flags", *names]):
        flags, *counts = (column.to_numpy() for column in batch.columns)
        flagged = flags != 0
        tokens += np.bincount(flagged, minlength=2)
        for layer, used in enumerate(counts):
            sums[:, layer] += used[~flagged].sum(dtype=np.int64), used[flagged].sum(dtype=np.int64)
    occurring = np.flatnonzero(tokens)
    return pa.table(
        {"flagged": occurring == 1, "tokens": tokens[occurring], **layer_columns("used_sum", sums[occurring])}
    )
