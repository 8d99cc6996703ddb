"""Positions: how nnz changes along a sequence.

    by_position(run)       a row a position and layer, with intervals
    position_blocks(run)   means over blocks of positions, for a heat map

Position 0 is `first`: it has no context, so it has rows of its own and fits leave it out. It is always flagged, as
first and often as special, but counted here unless its values are not finite. Later flagged tokens are left out unless
`flagged` is set. Cost: 5 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.layers import layer_moments
from twell.analysis.statistics import effective, mean_error, ratio_error, t_half
from twell.analysis.summaries.read import Summaries, open_summaries
from twell.workbench.errors import UserError
from twell.workbench.run.checks.uncounted import is_nowhere_finite, no_counted_token
from twell.workbench.run.store import Run

SUMS = ["tokens", "nnz_sum", "nnz_square"]
CLUSTER_SUMS = ["clusters_tokens_square", "clusters_nnz_square", "clusters_cross"]
ALIKE = 5  # documents, at most, that may have equal counts by chance
ROUNDING = 1e-7  # of a mean: a standard error up to that share of it is none
NOTE = "position 0 stands apart and is counted though it is flagged; flagged tokens after it are left out"


def by_position(run: Run, flagged: bool = False, total: bool = False) -> pd.DataFrame:
    """Return mean nnz at each position; a row a position and layer. Columns: position; layer; tokens; mean; se; low,
    high (95 %, Student's t); first (position 0).

    nnz in neurons a token. Standard errors are clustered by document; of a summary of before revision 4 they are those
    of independent sequences, and with `flagged` there are none. Where up to five documents have the same mean there
    are none either: it tells nothing of how much documents differ. `total` gives the sum over the layers, as layer -1,
    in place of them.
    """
    rows = _position_totals(open_summaries(run), flagged, total)
    mean, (se, clusters) = rows["nnz_sum"] / rows["tokens"], _errors(rows, flagged)
    half = t_half(clusters - 1) * se
    columns = {name: rows[name] for name in ("position", "layer", "tokens")}
    columns |= {"mean": mean, "se": se, "low": mean - half, "high": mean + half, "first": rows["position"] == 0}
    frame = pd.DataFrame(columns)
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": "" if flagged else NOTE,
        "sequences": run.manifest.sequences,
    }
    return frame


def _errors(rows: dict[str, NDArray], flagged: bool) -> tuple[NDArray, NDArray]:
    """Return the standard error of each mean, and the effective number of clusters that it rests on.

    Counts are whole numbers, which two documents share by chance: an error of 0 from a few of them is none.
    """
    n, y, y2 = (rows[name].astype(float) for name in SUMS)
    if flagged:
        return np.full(len(n), np.nan), np.full(len(n), np.nan)
    n2, square, cross = (rows[name] for name in CLUSTER_SUMS)
    if np.isnan(n2).all():  # a copy of an earlier revision
        error, clusters = mean_error(n, y, y2), n
    else:
        error, clusters = ratio_error(n, n2, y, square, cross), effective(n, n2)
    alike = (clusters <= ALIKE) & (error <= ROUNDING * y / n)
    return np.where(alike, np.nan, error), clusters


def position_blocks(run: Run, blocks: int | Sequence[int] = 24, flagged: bool = False) -> pd.DataFrame:
    """Return mean nnz over blocks of positions. Columns: layer; position_from, position_to (inclusive); tokens; mean;
    relative (mean / the layer's mean).

    `blocks` is how many blocks there are at most, growing with the position, or the first position of each. Position 0
    is a block of its own. The layer's mean is that of unflagged tokens, as in by_layer.
    """
    summaries = open_summaries(run)
    rows = _position_totals(summaries, flagged)
    last = int(rows["position"][-1])
    starts = _starts(blocks, last)
    ends = np.append(starts[1:] - 1, last)
    cell = rows["layer"] * len(starts) + np.searchsorted(starts, rows["position"], side="right") - 1
    tokens, nnz = (np.bincount(cell, rows[name], run.layers * len(starts)) for name in ("tokens", "nnz_sum"))
    occupied = np.flatnonzero(tokens)
    layer, block = np.divmod(occupied, len(starts))
    layer_mean, _ = layer_moments(summaries)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = nnz[occupied] / tokens[occupied]
        relative = mean / layer_mean[layer]
    frame = pd.DataFrame(
        {
            "layer": layer.astype(rows["layer"].dtype),
            "position_from": starts[block],
            "position_to": ends[block],
            "tokens": tokens[occupied].astype(np.int64),
            "mean": mean,
            "relative": relative,
        }
    )
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": "" if flagged else NOTE}
    return frame


def _position_totals(summaries: Summaries, flagged: bool, total: bool = False) -> dict[str, NDArray]:
    """Return sums of tokens, nnz and squared nnz by position and layer; with `total`, those of nnz summed over layers.

    Rows are sorted by position, then layer.
    """
    rows = summaries.columns("positions", "layer", "flagged", "position", *SUMS, *CLUSTER_SUMS)
    if rows["flagged"].all() and (not flagged or is_nowhere_finite(summaries.run)):
        raise no_counted_token(summaries.run, takes_flagged=True)
    selected = np.flatnonzero(((rows["layer"] < 0) == total) & (flagged | ~rows["flagged"]))
    size = summaries.run.layers + 1
    key = rows["position"][selected].astype(np.int64) * size + rows["layer"][selected]
    order = np.argsort(key, kind="stable")
    selected, key = selected[order], key[order]
    starts = np.flatnonzero(np.diff(key, prepend=key[:1] - 1))  # flagged tokens and others may share a key
    columns = {name: rows[name][selected[starts]] for name in ("position", "layer")}
    return columns | {name: np.add.reduceat(rows[name][selected], starts) for name in (*SUMS, *CLUSTER_SUMS)}


def _starts(blocks: int | Sequence[int], last: int) -> np.ndarray:
    """Return the first position of each block.

    blocks: these positions themselves; or the greatest number of blocks, which then start at 0, at 1, and onwards in
    equal ratios up to `last`.
    """
    if not isinstance(blocks, int):
        starts = np.unique(np.asarray(blocks, dtype=int))
        if not len(starts) or starts[0] < 0:
            raise UserError(f"Expected first positions of blocks, from 0 up, got {list(blocks)}.")
        return np.unique(np.append(0, starts[starts <= last]))
    if blocks < 2:
        raise UserError(f"Expected at least 2 blocks of positions, got {blocks}.")
    edges = np.geomspace(1, last + 1, blocks) if last else np.ones(1)
    return np.unique(np.append(0, np.round(edges[:-1] if last else edges[:0]).astype(int)))
