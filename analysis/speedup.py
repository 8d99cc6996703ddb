"""Speedup: what the sparse kernels gain over the dense ones, layer by layer, and how that follows from nnz.

    speedup(run)               a row a layer
    speedup_correlation(run)   Pearson and Spearman over layers, with interval and p
    model_speedup(run)         the whole forward pass
    timings_by_batch(run)      every timing, as recorded

Dense and sparse ran on the same input in the same batch. Cost: 10 ms (with 11 layers, about a second for the exact p).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis import summary
from twell.analysis.layers import moments
from twell.analysis.shared import shared
from twell.analysis.statistics import fisher_interval, permutation_p, student_p
from twell.workbench.errors import Missing
from twell.workbench.schema import PREFILL
from twell.workbench.store import Run

REFERENCE = "the reference kernel is an oracle, not a fast kernel: no speedup is claimed from it"
EXACT_BELOW = 12
OPS = {"dense_us": "ffn_dense", "sparse_us": "ffn_sparse", "gate_us": "gate"}


@shared
def timings(run: Run) -> pd.DataFrame:
    """The rows of the prefill phase, as recorded."""
    rows = run.frame("timings")
    return rows[rows["phase"] == PREFILL]


def of_one_size(rows: pd.DataFrame) -> pd.DataFrame:
    """Timings with each time brought, by the token, to the median rows of its operation: layers are timed in batches of
    their own, and batches differ in size."""
    rows = rows[rows["tokens"] > 0]
    median = rows.groupby("op")["tokens"].transform("median")
    return rows.assign(microseconds=rows["microseconds"] * (median / rows["tokens"]))


def timings_by_batch(run: Run) -> pd.DataFrame:
    """Columns: batch; layer (-1: the whole model); op; microseconds; nnz_mean; kernel. Prefill alone."""
    return _in_order(timings(run))


def _in_order(rows: pd.DataFrame) -> pd.DataFrame:
    rows = rows.sort_values(["batch", "layer", "op"], ignore_index=True)
    rows["nnz_mean"] = rows["nnz_mean"].astype("float64")  # means of float32 values are off in the seventh digit
    return rows[["batch", "layer", "op", "microseconds", "nnz_mean", "kernel"]]


@shared
def speedup(run: Run) -> pd.DataFrame:
    """Columns: layer; nnz_mean (of the batches timed; of the run's unflagged tokens where the timings have none);
    dense_us, sparse_us, gate_us (µs of a batch of median size, median over batches; gate where it was timed); speedup
    (median over batches of dense / sparse); repeats (batches); kernel (that ran the sparse op).

    `attrs["comparable"]` is false, with a sentence in `attrs["note"]`, where the reference ran. Missing where no batch
    was timed both dense and sparse.
    """
    rows = _in_order(of_one_size(timings(run)))
    wide = rows[rows["layer"] >= 0].pivot_table(index=["layer", "batch"], columns="op", values="microseconds")
    if not {"ffn_dense", "ffn_sparse"} <= set(wide.columns):
        raise Missing(f"{run.name} timed no batch both dense and sparse: capture with --timings above 0.")
    wide = wide.dropna(subset=["ffn_dense", "ffn_sparse"])
    wide["speedup"] = wide["ffn_dense"] / wide["ffn_sparse"]
    by_layer = wide.groupby("layer")
    sparse = rows[rows["op"] == "ffn_sparse"].groupby("layer")
    frame = pd.DataFrame({"nnz_mean": sparse["nnz_mean"].mean().reindex(by_layer.size().index)})
    if frame["nnz_mean"].isna().any():
        means, _ = moments(summary.read(run, "layers"), run.layers)
        frame["nnz_mean"] = frame["nnz_mean"].fillna(pd.Series(means))
    for column, op in OPS.items():
        frame[column] = by_layer[op].median() if op in wide else np.nan
    frame["speedup"], frame["repeats"] = by_layer["speedup"].median(), by_layer.size()
    frame["kernel"] = sparse["kernel"].agg(lambda names: ", ".join(sorted(set(names))))
    comparable = "reference" not in set(rows.loc[rows["op"] == "ffn_sparse", "kernel"])
    frame = frame.reset_index()
    frame.attrs = {
        "comparable": comparable,
        "note": f"{over_batches(*frame['repeats'].agg(['min', 'max']))}, prefill, {run.manifest.device}"
        if comparable
        else REFERENCE,
    }
    return frame


def over_batches(least: int, most: int | None = None) -> str:
    """What a number was taken over, in words."""
    more = "" if most is None or most == least else " or more"
    return f"one batch{more}" if least == 1 else f"median of {least} batches{more}"


@shared
def model_speedup(run: Run) -> dict[str, Any]:
    """The whole forward pass, dense against sparse on the same batches: dense_us, sparse_us (µs, medians); speedup,
    low, high (median, least and greatest over batches); energy (sparse over dense, power times time, median;
    NaN where the device reports no power); repeats (batches); kernel; comparable; note. Missing where it was not timed
    both ways."""
    rows = of_one_size(timings(run))
    rows = rows[rows["op"].isin(["model_dense", "model_sparse"])]
    if rows["op"].nunique() < 2:
        raise Missing(f"{run.name} did not time the whole forward pass both dense and sparse.")
    wide = rows.pivot_table(index="batch", columns="op", values=["microseconds", "watts"], dropna=False)
    time = wide["microseconds"].dropna()
    ratio = time["model_dense"] / time["model_sparse"]
    kernels = set(rows.loc[rows["op"] == "model_sparse", "kernel"])
    energy = np.nan
    if "watts" in wide and len(wide["watts"].dropna()):
        power = wide["watts"].dropna().astype("float64")
        energy = float((power["model_sparse"] / power["model_dense"] / ratio).median())
    comparable = "reference" not in kernels
    return {
        "dense_us": float(time["model_dense"].median()),
        "sparse_us": float(time["model_sparse"].median()),
        "speedup": float(ratio.median()),
        "low": float(ratio.min()),
        "high": float(ratio.max()),
        "energy": energy,
        "repeats": len(ratio),
        "kernel": ", ".join(sorted(kernels)),
        "comparable": comparable,
        "note": f"{over_batches(len(ratio))}, prefill, {run.manifest.device}" if comparable else REFERENCE,
    }


def speedup_correlation(run: Run) -> dict[str, Any]:
    """Mean nnz against speedup over layers: pearson, spearman, low, high (95 % of Pearson's, Fisher's z), n, p
    (two-sided, of Pearson's), method (how p was found), comparable, note.

    p is exact over all pairings under 12 layers, from Student's t with more. Missing with fewer than 4 layers, or
    where all are alike.
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
    """Over 4 layers or more that differ: pearson, spearman, low, high (95 % of Pearson's, Fisher's z), n, p, method."""
    n = len(x)
    pearson = float(np.corrcoef(x, y)[0, 1])
    low, high = fisher_interval(pearson, 1 / np.sqrt(n - 3), np.inf)
    exact = n < EXACT_BELOW
    return {
        "pearson": pearson,
        "spearman": float(pd.Series(x).rank().corr(pd.Series(y).rank())),
        "low": float(low),
        "high": float(high),
        "n": n,
        "p": permutation_p(x, y) if exact else student_p(pearson, n),
        "method": "exact over all pairings" if exact else "Student's t",
    }
