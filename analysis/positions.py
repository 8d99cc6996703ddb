"""Positions: how nnz changes along a sequence.

    by_position(run)       a row a position and layer, with intervals
    position_blocks(run)   means over blocks of positions, for a heat map

Position 0 is `first`: it has no context, so it stands apart and fits leave it out. It is always flagged, as first and
often as special, and is counted here all the same unless it is not finite; flagged tokens further on are left out
unless asked for. Cost: 5 ms.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis import summary
from twell.analysis.layers import moments
from twell.analysis.statistics import mean_error, t_half
from twell.workbench.errors import Missing, UserError
from twell.workbench.store import Run

EACH = 8  # positions below it are bands of their own
SUMS = ["tokens", "nnz_sum", "nnz_square"]
NOTE = "position 0 stands apart and is counted though it is flagged; flagged tokens after it are left out"


def by_position(run: Run, flagged: bool = False, total: bool = False) -> pd.DataFrame:
    """Columns: position; layer; tokens; mean; se; low, high (95 %, Student's t); first (position 0).

    nnz in neurons a token. A sequence has one token at each position, so n is the number of sequences that reach it
    and the error is that of independent values. `total` gives the sum over the layers, as layer -1, in place of them.
    """
    rows = _sums(run, flagged)
    rows = rows[(rows["layer"] < 0) if total else (rows["layer"] >= 0)].reset_index(drop=True)
    n, y, y2 = (rows[name].to_numpy(float) for name in ("tokens", "nnz_sum", "nnz_square"))
    frame = rows[["position", "layer", "tokens"]].copy()
    frame["mean"] = y / n
    frame["se"] = mean_error(n, y, y2)
    half = t_half(n - 1) * frame["se"].to_numpy()
    frame["low"], frame["high"] = frame["mean"] - half, frame["mean"] + half
    frame["first"] = frame["position"] == 0
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": "" if flagged else NOTE,
        "sequences": run.manifest.sequences,
    }
    return frame


def position_blocks(run: Run, blocks: int | Sequence[int] = 24, flagged: bool = False) -> pd.DataFrame:
    """Columns: layer; position_from, position_to (inclusive); tokens; mean; relative (mean / the layer's mean).

    `blocks` is how many blocks there are at most, growing with the position, or the first position of each. Position
    0 is a block of its own. The layer's mean is that of unflagged tokens, as in by_layer.
    """
    rows = _sums(run, flagged)
    rows = rows[rows["layer"] >= 0]
    last = int(rows["position"].max())
    starts = _starts(blocks, last)
    block = np.searchsorted(starts, rows["position"].to_numpy(), side="right") - 1
    ends = np.append(starts[1:] - 1, last)
    grouped = rows.assign(block=block).groupby(["layer", "block"], as_index=False)[["tokens", "nnz_sum"]].sum()
    mean = grouped["nnz_sum"] / grouped["tokens"]
    layer_mean, _ = moments(summary.read(run, "layers"), run.layers)
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = mean.to_numpy() / layer_mean[grouped["layer"].to_numpy()]
    frame = pd.DataFrame(
        {
            "layer": grouped["layer"],
            "position_from": starts[grouped["block"].to_numpy()],
            "position_to": ends[grouped["block"].to_numpy()],
            "tokens": grouped["tokens"],
            "mean": mean,
            "relative": relative,
        }
    )
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": "" if flagged else NOTE}
    return frame


def _sums(run: Run, flagged: bool) -> pd.DataFrame:
    rows = summary.read(run, "positions")
    rows = rows if flagged else rows[~rows["flagged"]]
    if rows.empty:
        raise Missing(f"{run.name} holds no unflagged token: ask for flagged=True to see those it holds.")
    if not flagged:
        order = np.lexsort((rows["layer"], rows["position"]))
        return rows[["position", "layer", *SUMS]].iloc[order].reset_index(drop=True)
    sums = rows.groupby(["position", "layer"], as_index=False)[SUMS].sum()
    return sums.sort_values(["position", "layer"], ignore_index=True)


def band_moments(rows: pd.DataFrame, mean: NDArray, sd: NDArray) -> tuple[NDArray, NDArray]:
    """Mean and sd of nnz by band of positions and layer [band, layer], from the rows of the summary `positions`.

    A band is a position below 8, then floor(√(8·position)). Over unflagged tokens; where a band has none, `mean` and
    `sd` of its layer stand in.
    """
    layers = len(mean)
    position = rows["position"].to_numpy()
    band = np.where(position < EACH, position, np.floor(np.sqrt(EACH * position.astype(float)))).astype(int)
    used = (~rows["flagged"] & (rows["layer"] >= 0)).to_numpy()
    place = band[used] * layers + rows["layer"].to_numpy()[used]
    shape = (int(band.max(initial=0)) + 1, layers)
    n, y, y2 = (
        np.bincount(place, rows[name].to_numpy(float)[used], shape[0] * layers).reshape(shape)
        for name in ("tokens", "nnz_sum", "nnz_square")
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = y / n
        spread = np.sqrt(np.maximum(y2 / n - inside**2, 0))
    return np.where(n > 0, inside, mean), np.where(n > 0, spread, sd)


def _starts(blocks: int | Sequence[int], last: int) -> np.ndarray:
    """First positions of the blocks: 0, 1, and on in equal ratios."""
    if not isinstance(blocks, int):
        starts = np.unique(np.asarray(blocks, dtype=int))
        if not len(starts) or starts[0] < 0:
            raise UserError(f"Expected first positions of blocks, from 0 up, got {list(blocks)}.")
        return np.unique(np.append(0, starts[starts <= last]))
    if blocks < 2:
        raise UserError(f"Expected at least 2 blocks of positions, got {blocks}.")
    edges = np.geomspace(1, last + 1, blocks) if last else np.ones(1)
    return np.unique(np.append(0, np.round(edges[:-1] if last else edges[:0]).astype(int)))
