"""Layers: how many neurons fire in each, how that spreads over tokens, and how many never do.

    by_layer(run)          a row a layer
    layer_histogram(run)   a row a layer and count: what every quantile is exact from

Cost: a few milliseconds, from the summaries `layers` and `neurons`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis import summary
from twell.analysis.shared import shared
from twell.analysis.statistics import distinct, jackknife_error, quantiles, t_half
from twell.workbench.errors import Missing
from twell.workbench.store import Run

QUANTILES = {"p10": 0.10, "p50": 0.50, "p90": 0.90, "p99": 0.99}
DEAD_BOUND = 3.0  # with no firing in N tokens, 3/N is the 95 % upper bound of a neuron's density (rule of three)


def layer_histogram(run: Run, flagged: bool = False) -> pd.DataFrame:
    """Columns: layer, nnz, tokens (how many have that count). Flagged tokens are left out unless asked for."""
    rows = histogram(run, flagged)
    return rows[rows["layer"] >= 0].reset_index(drop=True)


def histogram(run: Run, flagged: bool = False) -> pd.DataFrame:
    """As layer_histogram, with the sum over all layers as layer -1. Missing where no token is left to count."""
    rows = summary.read(run, "layers")
    rows = rows if flagged else rows[~rows["flagged"]]
    if rows.empty:
        raise Missing(f"{run.name} holds no unflagged token: ask for flagged=True to see those it holds.")
    if not flagged:
        return rows[["layer", "nnz", "tokens"]].reset_index(drop=True)
    return rows.groupby(["layer", "nnz"])["tokens"].sum().reset_index()


@shared
def by_layer(run: Run, flagged: bool = False) -> pd.DataFrame:
    """Columns, nnz in neurons a token:

    layer; tokens; mean; sd (over tokens, divisor N); p10, p50, p90, p99 (exact: the least count that at least so many
    tokens do not exceed); max; sparsity (1 - mean / d_ff); share (of the nnz of all layers); dead (neurons that did
    not fire in any unflagged token of the run); dead_share; dead_upper (95 % upper bound of a dead neuron's density:
    3 / tokens, were its tokens independent); dead_sequences (95 % upper bound of the share of sequences in which a dead
    neuron fires at all, 3 / sequences, however its tokens go together); used (mean of the fired neurons whose product
    is not zero); low, high (95 % of the mean, jackknifed over twenty groups of sequences). The dead columns are empty
    where the run keeps no neuron sums, `used` where the model has no ReLU on the up branch, the interval with
    flagged=True.
    """
    counted = layer_histogram(run, flagged)
    rows = []
    starts = np.flatnonzero(np.diff(counted["layer"], prepend=-1))
    split = [np.split(counted[name].to_numpy(), starts[1:]) for name in ("nnz", "tokens")]
    for layer, nnz, tokens in zip(counted["layer"].to_numpy(np.int64)[starts], *split, strict=True):
        n = int(tokens.sum())
        mean = float((nnz * tokens).sum() / n)
        sd = float(np.sqrt((tokens * (nnz - mean) ** 2).sum() / n))
        found = dict(zip(QUANTILES, quantiles(nnz, tokens, list(QUANTILES.values())), strict=True))
        rows.append({"layer": layer, "tokens": n, "mean": mean, "sd": sd, **found, "max": int(nnz.max())})
    frame = pd.DataFrame(rows)
    frame["sparsity"] = 1 - frame["mean"] / run.d_ff
    total = float((frame["mean"] * frame["tokens"]).sum())
    frame["share"] = frame["mean"] * frame["tokens"] / total if total else np.nan
    counted_out_of = unflagged_tokens(run)
    try:
        fired = summary.read(run, "neurons", ("layer",))["layer"].to_numpy()
        alive = np.bincount(fired, minlength=run.layers)[frame["layer"]]
        frame["dead"] = pd.array(run.d_ff - alive, dtype="Int64")
        lacking = ""
    except Missing as reason:
        lacking = str(reason)
        frame["dead"] = pd.array([None] * len(frame), dtype="Int64")
    frame["dead_share"] = frame["dead"].to_numpy(float, na_value=np.nan) / run.d_ff
    bound = DEAD_BOUND / counted_out_of if counted_out_of else np.nan
    frame["dead_upper"] = np.where(frame["dead"].isna(), np.nan, bound)
    frame["dead_sequences"] = np.where(
        frame["dead"].isna(), np.nan, min(1.0, DEAD_BOUND / max(run.manifest.sequences, 1))
    )
    frame["used"] = _used(run, flagged).reindex(frame["layer"]).to_numpy()
    half = frame["layer"].map(_half_width(run)) if not flagged else np.nan
    frame["low"], frame["high"] = frame["mean"] - half, frame["mean"] + half
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "tokens": int(frame["tokens"].iloc[0]),
        "sequences": run.manifest.sequences,
        "note": lacking
        or f"dead: no firing in {counted_out_of:,} unflagged tokens of {run.manifest.sequences:,} sequences; "
        f"the density of such a neuron is below {bound:.2g} with 95 % confidence, were its tokens independent, and it "
        f"fires in less than {100 * DEAD_BOUND / max(run.manifest.sequences, 1):.2g} % of sequences however they are",
    }
    return frame


def _half_width(run: Run) -> pd.Series:
    """Half of the 95 % interval of each layer's mean; empty with fewer than two groups of sequences."""
    rows = summary.read(run, "position_bands")
    groups, replicate = distinct(rows["replicate"])
    place, shape = replicate * (run.layers + 1) + rows["layer"].to_numpy() + 1, (len(groups), run.layers + 1)
    n, y = (np.bincount(place, rows[name], np.prod(shape)).reshape(shape) for name in ("tokens", "nnz_sum"))
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate, without = y.sum(axis=0) / n.sum(axis=0), (y.sum(axis=0) - y) / (n.sum(axis=0) - n)
    return pd.Series(t_half(len(groups) - 1) * jackknife_error(estimate, without), range(-1, run.layers))


def _used(run: Run, flagged: bool) -> pd.Series:
    try:
        rows = summary.read(run, "used")
    except Missing:
        return pd.Series(dtype=float)
    sums = (rows if flagged else rows[~rows["flagged"]]).groupby("layer")[["used_sum", "tokens"]].sum()
    return sums["used_sum"] / sums["tokens"]


def unflagged_tokens(run: Run) -> int:
    """How many tokens the statistics count by default."""
    rows = summary.read(run, "layers")
    return int(rows.loc[(rows["layer"] == 0) & ~rows["flagged"], "tokens"].sum())


def moments(counted: pd.DataFrame, layers: int) -> tuple[NDArray, NDArray]:
    """Mean and sd of nnz by layer over unflagged tokens, from the rows of the summary `layers`."""
    used = counted[~counted["flagged"] & (counted["layer"] >= 0)]
    layer, nnz, tokens = (used[name].to_numpy() for name in ("layer", "nnz", "tokens"))
    n = np.bincount(layer, tokens, minlength=layers)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.bincount(layer, tokens * nnz, minlength=layers) / n
        return mean, np.sqrt(np.bincount(layer, tokens * (nnz - mean[layer]) ** 2, minlength=layers) / n)
