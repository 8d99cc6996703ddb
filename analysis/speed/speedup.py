"""Speedup: what the sparse kernels gain over the dense ones, layer by layer, and how that follows from nnz.

    speedup(run)               a row a layer
    speedup_correlation(run)   Pearson and Spearman over layers, with interval and p
    ffn_speedup(run)           all timed layers together, with its interval and what to mind
    model_speedup(run)         the whole forward pass
    timings_by_batch(run)      every timing, as recorded

Dense and sparse ran on the same input in the same batch, in older runs on as many rows of it, else the dense FFN on the
first rows and brought to as many. Cost: 10 ms (with 11 layers, about a second for the exact p).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.layers import layer_moments
from twell.analysis.memo import memoized
from twell.analysis.statistics import (
    distinct,
    fisher_interval,
    grouped_median,
    mid_ranks,
    permutation_p,
    student_p,
    t_half,
)
from twell.analysis.summaries.read import open_summaries
from twell.workbench.errors import Missing
from twell.workbench.run.checks.uncounted import is_nowhere_finite, no_counted_token
from twell.workbench.run.schema import PREFILL, WHOLE_MODEL
from twell.workbench.run.store import Run
from twell.workbench.run.tables.absent import ABSENT

REFERENCE = "the reference kernel is an oracle, not a fast kernel: no speedup is claimed from it"
EXACT_BELOW = 12
LEAST_BATCHES = 3  # for an interval of a speedup
BLOCKS = 10  # of successive batches, whose means are nearly independent where batches are not


@memoized
def timings(run: Run) -> pd.DataFrame:
    """Return the timings of the prefill phase, as recorded."""
    rows = run.frame("timings")
    return rows[rows["phase"] == PREFILL]


@memoized
def of_one_size(run: Run) -> pd.DataFrame:
    """Return `timings` with each time scaled, by the token, to the rows that `sizes` has for its operation: layers are
    timed in batches of their own, and batches differ in size."""
    rows = timings(run)
    rows = rows[rows["tokens"] > 0]
    return rows.assign(microseconds=rows["microseconds"] * (rows["op"].map(sizes(run)) / rows["tokens"]))


def sizes(run: Run) -> dict[str, float]:
    """Return how many rows each operation's times are brought to: for those of a layer the median of its sparse calls,
    for others their own median."""
    rows = timings(run)
    medians = {str(op): float(np.median(tokens)) for op, tokens in rows.groupby("op")["tokens"]}
    ours = medians.get("ffn_sparse")
    return {op: own if ours is None or op in (*WHOLE_MODEL, "pass") else ours for op, own in medians.items()}


def rows_timed(run: Run) -> dict[str, tuple[int, int]]:
    """Return the fewest and the most rows on which a layer ran, dense ("ffn_dense") and sparse ("ffn_sparse"), in the
    batches that timed both."""
    rows = timings(run)
    tokens = _side_by_side(rows[rows["layer"] >= 0], "tokens", ("ffn_dense", "ffn_sparse"))[2]
    both = tokens[:, ~np.isnan(tokens).any(axis=0)]
    return {op: (int(of.min()), int(of.max())) for op, of in zip(("ffn_dense", "ffn_sparse"), both, strict=True)}


def is_scaled(run: Run) -> bool:
    """Return whether times of layers are brought to another number of rows than they were taken on."""
    timed = rows_timed(run)
    return {*timed["ffn_dense"], *timed["ffn_sparse"]} != {round(sizes(run)["ffn_sparse"])}


def timings_by_batch(run: Run) -> pd.DataFrame:
    """Return every timing of the prefill phase. Columns: batch; layer (-1: the whole model); op; microseconds;
    nnz_mean; kernel."""
    rows = timings(run).sort_values(["batch", "layer", "op"], ignore_index=True)
    rows["nnz_mean"] = rows["nnz_mean"].astype("float64")  # means of float32 values are off in the seventh digit
    rows = rows[["batch", "layer", "op", "microseconds", "nnz_mean", "kernel"]]
    rows.attrs["note"] = f"prefill, each batch of its own size, {run.manifest.device}"
    return rows


@memoized
def speedup(run: Run) -> pd.DataFrame:
    """Return dense and sparse times of each layer's FFN, and their ratio. Columns: layer; nnz_mean (of the calls that
    were timed beside dense; of the run's unflagged tokens where the timings have none); dense_us, sparse_us, gate_us
    (µs of a batch of median size, median over batches that were timed both ways; gate where it was timed); speedup,
    low, high (`geometric` of dense over sparse of those batches: not exactly the ratio of the medians, of which no
    interval is known; NaN ends under three); repeats (such batches); kernel (that ran the sparse op).

    `attrs["comparable"]` is false, with a sentence in `attrs["note"]`, where the reference ran. Missing where no batch
    was timed both dense and sparse.
    """
    layer, _, (dense, sparse, gate, nnz) = pairs(run)
    layers, index = distinct(layer)
    rows = timings(run)
    rows = rows[(rows["op"] == "ffn_sparse") & (rows["layer"] >= 0)]
    timed, kernels = rows["layer"].to_numpy(), rows["kernel"].to_numpy(object)
    nnz = _means(index, nnz, len(layers))
    repeats = np.bincount(index)
    if not np.nan_to_num(nnz).any() and is_nowhere_finite(run):  # rows of NaN fire nothing, and so cost nothing
        raise no_counted_token(run)
    if np.isnan(nnz).any():
        nnz = np.where(np.isnan(nnz), layer_moments(open_summaries(run))[0][layers], nnz)
    columns: dict[str, Any] = {"layer": layers.astype(timed.dtype), "nnz_mean": nnz}
    for name, values in {"dense_us": dense, "sparse_us": sparse, "gate_us": gate}.items():
        columns[name] = grouped_median(values, index)
    estimates = [geometric((dense / sparse)[index == n]) for n in range(len(layers))]
    columns |= dict(zip(("speedup", "low", "high"), np.transpose(estimates), strict=True))
    columns |= {"repeats": repeats, "kernel": [", ".join(sorted(set(kernels[timed == n]))) for n in layers]}
    frame = pd.DataFrame(columns)
    comparable = "reference" not in kernels
    frame.attrs = {
        "comparable": comparable,
        "note": f"{over_batches(repeats.min(), repeats.max())}, prefill, {run.manifest.device}"
        if comparable
        else REFERENCE,
    }
    return frame


def pairs(run: Run) -> tuple[NDArray, NDArray, NDArray]:
    """Return layer and batch of each pair of a dense and a sparse time [pair], ascending, and its times (µs of a batch
    of median size) and nnz: dense, sparse, gate, mean nnz [4, pair]; NaN where the gate or nnz is not known.

    Missing where no batch was timed both dense and sparse.
    """
    rows = of_one_size(run)
    rows = rows[rows["layer"] >= 0]
    layer, batch, times = _side_by_side(rows, "microseconds", ("ffn_dense", "ffn_sparse", "gate"))
    nnz = _side_by_side(rows, "nnz_mean", ("ffn_sparse",))[2]
    both = ~np.isnan(times[0] + times[1])
    if not both.any():
        raise Missing(f"{run.name} timed no batch both dense and sparse: {ABSENT['timings'][1]}.")
    return layer[both], batch[both], np.concatenate([times, nnz])[:, both]


def _side_by_side(rows: pd.DataFrame, value: str, ops: Sequence[str]) -> tuple[NDArray, NDArray, NDArray]:
    """Return layer and batch of each pair of the two [pair], and one column of the timings [operation, pair].

    rows: timings; value: the column's name; ops: the operations. An entry is the mean where the operation was timed
    several times, NaN where it was not timed.
    """
    batch, values = rows["batch"].to_numpy(np.int64), rows[value].to_numpy(float)
    size = int(batch.max(initial=0)) + 1
    keys, index = np.unique(rows["layer"].to_numpy() * size + batch, return_inverse=True)
    columns = np.empty((len(ops), len(keys)))
    for row, op in zip(columns, ops, strict=True):
        selected = (rows["op"] == op).to_numpy()
        row[:] = _means(index[selected], values[selected], len(keys))
    return keys // size, keys % size, columns


def _means(group: NDArray, values: NDArray, size: int) -> NDArray:
    """Return the mean of the values of each group, NaN left out; NaN for a group without any. group [n]: that of each
    value, below `size`."""
    valid = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.bincount(group[valid], values[valid], size) / np.bincount(group[valid], minlength=size)


def over_batches(fewest: int, greatest: int | None = None) -> str:
    """Return in words how many batches a number was taken over, from `fewest` to `greatest`."""
    suffix = "" if greatest is None or greatest == fewest else " or more"
    return f"one batch{suffix}" if fewest == 1 else f"median of {fewest} batches{suffix}"


def geometric(ratios: NDArray, least: int = LEAST_BATCHES) -> tuple[float, float, float]:
    """Return the geometric mean of successive ratios, and its 95 % interval as `mean_interval` has it."""
    mean, low, high = np.exp(mean_interval(np.log(ratios), least))
    return float(mean), float(low), float(high)


def mean_interval(values: NDArray, least: int = LEAST_BATCHES) -> tuple[float, float, float]:
    """Return the mean of successive values, and its 95 % interval by Student's t over BLOCKS blocks of them; NaN ends
    under `least` values, NaN without any."""
    n = len(values)
    mean = float(values.mean()) if n else np.nan
    half = float(t_half(min(n, BLOCKS) - 1)) * blocks_error(values, BLOCKS) if n >= least else np.nan
    return mean, mean - half, mean + half


def blocks_error(values: NDArray, blocks: int) -> float:
    """Return the standard error of the mean of successive values, over means of so many blocks of them: neighbours are
    alike, and taken as independent a 95 % interval holds the truth 90 % of the time where they correlate at 0.2, 70 %
    at 0.6. Where there are no more values than blocks, they are taken as independent: so few do not tell how alike."""
    means = [block.mean() for block in np.array_split(values, min(blocks, len(values)))]
    return float(np.std(means, ddof=1) / np.sqrt(len(means)))


@memoized
def model_speedup(run: Run) -> dict[str, Any]:
    """Return the times of the whole forward pass, dense and sparse on the same batches. Keys:

    dense_us, sparse_us (µs, medians); speedup, low, high (`geometric` of the batches' ratios); energy (sparse over
    dense, power times time, median; NaN where the device reports no power); energy_repeats (batches of that); repeats
    (batches); kernel; comparable; note. Raises Missing where it was not timed both ways.
    """
    rows = of_one_size(run)
    rows = rows[rows["op"].isin(WHOLE_MODEL)]
    (*_, (dense, sparse)), (*_, power) = (_side_by_side(rows, name, WHOLE_MODEL) for name in ("microseconds", "watts"))
    both = ~np.isnan(dense + sparse)
    if not both.any():
        raise Missing(f"{run.name} did not time the whole forward pass both dense and sparse.")
    dense, sparse, power = dense[both], sparse[both], power[:, both]
    ratio, energy = dense / sparse, power[1] / power[0] * sparse / dense
    energy = energy[~np.isnan(energy)]
    kernels = set(rows.loc[rows["op"] == "model_sparse", "kernel"])
    comparable = "reference" not in kernels
    return {
        "dense_us": float(np.median(dense)),
        "sparse_us": float(np.median(sparse)),
        **dict(zip(("speedup", "low", "high"), geometric(ratio), strict=True)),
        "energy": float(np.median(energy)) if len(energy) else np.nan,
        "energy_repeats": len(energy),
        "repeats": len(ratio),
        "kernel": ", ".join(sorted(kernels)),
        "comparable": comparable,
        "note": f"{over_batches(len(ratio))}, prefill, {run.manifest.device}" if comparable else REFERENCE,
    }


def speedup_correlation(run: Run) -> dict[str, Any]:
    """Correlate mean nnz with speedup over layers: pearson, spearman, low, high (95 % of Pearson's, Fisher's z), n, p
    (two-sided, of Pearson's), method (how p was found), comparable, note.

    p is exact over all pairings under 12 layers, from Student's t with more. Missing with fewer than 4 layers, or where
    all are alike.
    """
    frame = speedup(run)
    n = len(frame)
    if n < 4:
        raise Missing(f"A correlation over layers needs at least 4 of them, {run.name} timed {n}.")
    x, y = frame["nnz_mean"].to_numpy(float), frame["speedup"].to_numpy(float)
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        raise Missing(f"Every layer of {run.name} has the same nnz or the same speedup: there is nothing to correlate.")
    return {**correlate(x, y), "comparable": frame.attrs["comparable"], "note": frame.attrs["note"]}


def correlate(x: NDArray, y: NDArray) -> dict[str, Any]:
    """Correlate x with y over 4 or more layers that differ: pearson, spearman, low, high (95 % of Pearson's, Fisher's
    z), n, p, method."""
    n = len(x)
    pearson = float(np.corrcoef(x, y)[0, 1])
    low, high = fisher_interval(pearson, 1 / np.sqrt(n - 3), np.inf)
    exact = n < EXACT_BELOW
    return {
        "pearson": pearson,
        "spearman": float(np.corrcoef(mid_ranks(x), mid_ranks(y))[0, 1]),
        "low": float(low),
        "high": float(high),
        "n": n,
        "p": permutation_p(x, y) if exact else student_p(pearson, n),
        "method": "exact over all pairings" if exact else "Student's t",
    }
