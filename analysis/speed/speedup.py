"""Speedup: what the sparse kernels gain over the dense ones, layer by layer, and how that follows from nnz.

    speedup(run)               a row a layer
    speedup_correlation(run)   Pearson and Spearman over layers, with interval and p
    model_speedup(run)         the whole forward pass
    timings_by_batch(run)      every timing, as recorded

Dense and sparse ran on the same input in the same batch. Cost: 10 ms (with 11 layers, about a second for the exact p).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.layers import layer_moments
from twell.analysis.memo import memoized
from twell.analysis.statistics import distinct, fisher_interval, grouped_median, mid_ranks, permutation_p, student_p
from twell.analysis.summaries.read import open_summaries
from twell.workbench.errors import Missing
from twell.workbench.run.schema import PREFILL
from twell.workbench.run.store import Run
from twell.workbench.run.uncounted import is_nowhere_finite, no_counted_token

REFERENCE = "the reference kernel is an oracle, not a fast kernel: no speedup is claimed from it"
EXACT_BELOW = 12
WHOLE = ("model_dense", "model_sparse")


@memoized
def timings(run: Run) -> pd.DataFrame:
    """Return the timings of the prefill phase, as recorded."""
    rows = run.frame("timings")
    return rows[rows["phase"] == PREFILL]


@memoized
def of_one_size(run: Run) -> pd.DataFrame:
    """Return `timings` with each time scaled in proportion to tokens, to the median number of rows of its operation.

    Layers are timed in different batches, and batches differ in size.
    """
    rows = timings(run)
    rows = rows[rows["tokens"] > 0]
    op, _ = pd.factorize(rows["op"])
    median = grouped_median(rows["tokens"].to_numpy(float), op)
    return rows.assign(microseconds=rows["microseconds"] * (median[op] / rows["tokens"]))


def timings_by_batch(run: Run) -> pd.DataFrame:
    """Return every timing of the prefill phase. Columns: batch; layer (-1: the whole model); op; microseconds;
    nnz_mean; kernel. Prefill alone."""
    rows = timings(run).sort_values(["batch", "layer", "op"], ignore_index=True)
    rows["nnz_mean"] = rows["nnz_mean"].astype("float64")  # means of float32 values are off in the seventh digit
    return rows[["batch", "layer", "op", "microseconds", "nnz_mean", "kernel"]]


@memoized
def speedup(run: Run) -> pd.DataFrame:
    """Return dense and sparse times of each layer's FFN, and their ratio. Columns: layer; nnz_mean (of the batches
    timed; of the run's unflagged tokens where the timings have none); dense_us, sparse_us, gate_us (µs of a batch of
    median size, median over batches; gate where it was timed); speedup (median over batches of dense / sparse); repeats
    (batches); kernel (that ran the sparse op).

    `attrs["comparable"]` is false, with a sentence in `attrs["note"]`, where the reference ran. Missing where no batch
    was timed both dense and sparse.
    """
    rows = of_one_size(run)
    rows = rows[rows["layer"] >= 0]
    layer, (dense, sparse, gate) = _side_by_side(rows, "microseconds", ("ffn_dense", "ffn_sparse", "gate"))
    both = ~np.isnan(dense + sparse)
    if not both.any():
        raise Missing(f"{run.name} timed no batch both dense and sparse: capture with --timings above 0.")
    layers, index = distinct(layer[both])
    rows = rows[rows["op"] == "ffn_sparse"]
    timed, kernels = rows["layer"].to_numpy(), rows["kernel"].to_numpy(object)
    nnz = _means(timed, rows["nnz_mean"].to_numpy(float), run.layers)[layers]
    repeats = np.bincount(index)
    if not np.nan_to_num(nnz).any() and is_nowhere_finite(run):  # rows of NaN fire nothing, and so cost nothing
        raise no_counted_token(run)
    if np.isnan(nnz).any():
        nnz = np.where(np.isnan(nnz), layer_moments(open_summaries(run))[0][layers], nnz)
    columns: dict[str, Any] = {"layer": layers.astype(timed.dtype), "nnz_mean": nnz}
    for name, values in {"dense_us": dense, "sparse_us": sparse, "gate_us": gate, "speedup": dense / sparse}.items():
        columns[name] = grouped_median(values[both], index)
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


def _side_by_side(rows: pd.DataFrame, value: str, ops: Sequence[str]) -> tuple[NDArray, NDArray]:
    """Return the layer of each pair of layer and batch [pair], and one column of the timings [operation, pair].

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
    return keys // size, columns


def _means(group: NDArray, values: NDArray, size: int) -> NDArray:
    """Return the mean of the values of each group, NaN left out; NaN for a group without any. place [n]: the group of
    each value, below `size`."""
    valid = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.bincount(group[valid], values[valid], size) / np.bincount(group[valid], minlength=size)


def over_batches(fewest: int, greatest: int | None = None) -> str:
    """Return in words how many batches a number was taken over, from `fewest` to `greatest`."""
    suffix = "" if greatest is None or greatest == fewest else " or more"
    return f"one batch{suffix}" if fewest == 1 else f"median of {fewest} batches{suffix}"


@memoized
def model_speedup(run: Run) -> dict[str, Any]:
    """Return the times of the whole forward pass, dense and sparse on the same batches: dense_us, sparse_us (µs,
    medians); speedup, low, high (median, least and greatest over batches); energy (sparse over dense, power times time,
    median; NaN where the device reports no power); repeats (batches); kernel; comparable; note. Missing where it was
    not timed both ways."""
    rows = of_one_size(run)
    rows = rows[rows["op"].isin(WHOLE)]
    (_, (dense, sparse)), (_, power) = (_side_by_side(rows, name, WHOLE) for name in ("microseconds", "watts"))
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
        "speedup": float(np.median(ratio)),
        "low": float(ratio.min()),
        "high": float(ratio.max()),
        "energy": float(np.median(energy)) if len(energy) else np.nan,
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
        raise Missing(f"{run.name} timed {n} layers: a correlation over layers needs at least 4.")
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
