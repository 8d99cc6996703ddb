"""Put the sparse FFN of each case in a run's `bench` table beside the dense one, for the page of benchmarks.

`bench` has a row a figure. Here a row is one kernel in one case, with the ratios of times that a reader compares.
Cost: 50 ms for 7 000 figures.
"""

from __future__ import annotations

import pandas as pd

from twell.analysis.speed.whole_model import WHOLE
from twell.workbench.run.store import Run

CASE = ["case", "input", "ffn", "layer", "rows", "dtype", "weights", "graph"]
DENSE, SPARSE, STAGES = "ffn_dense", "ffn_sparse", ["gate", "up_down"]
BASELINES = ["ffn_compiled", "ffn_fused"]
OTHERS = f"train_|{WHOLE}"  # operations that are no FFN of one layer
PROBES = ["ffn_counts", "ffn_neurons", "ffn_packed"]


def cases(run: Run) -> pd.DataFrame:
    """Return a row for each kernel in each case of the bench.

    Columns: those of CASE; kernel; nnz_mean; repeats (turns behind each median); dense_us, sparse_us (median
    microseconds of a call; a kernel that was timed stage by stage has the sum of its stages); ratio (dense_us /
    sparse_us); for each of BASELINES and PROBES its time over dense_us or sparse_us, NaN where it was not timed;
    error_mean, error_max (error of a row relative to float64, over the dense FFN's, NaN for stages).
    """
    bench = run.frame("bench")
    bench = bench[(bench["d_ff"] == run.d_ff) & ~bench["op"].str.match(OTHERS)]
    # A key of the index: `unstack` would put the cases into another order than that of the bench.
    order = {case: number for number, case in enumerate(dict.fromkeys(bench["case"]))}
    times = bench[bench["metric"] == "microseconds"].groupby([*CASE, "kernel", "op"])["value"].median().unstack()
    times = times.reindex(columns=[DENSE, SPARSE, *STAGES, *BASELINES, *PROBES])
    errors = bench[bench["metric"].isin(("error_mean", "error_max"))]
    errors = errors.groupby([*CASE, "kernel", "op", "metric"])["value"].median().unstack().unstack()
    torch = times.xs("torch", level="kernel")
    kernels = times.drop(index="torch", level="kernel")
    frame = kernels.reset_index()[[*CASE, "kernel"]]
    keys = pd.MultiIndex.from_frame(frame[CASE])
    frame["dense_us"] = torch[DENSE].reindex(keys).to_numpy()
    stages = kernels[STAGES].sum(axis=1, skipna=False)
    frame["sparse_us"] = kernels[SPARSE].fillna(stages).to_numpy()
    frame["ratio"] = frame["dense_us"] / frame["sparse_us"]
    for op in BASELINES:
        frame[op] = frame["dense_us"] / torch[op].reindex(keys).to_numpy()
    for op in PROBES:
        frame[op] = kernels[op].to_numpy() / frame["sparse_us"]
    dense_errors, sparse_errors = errors.xs("torch", level="kernel"), errors.drop(index="torch", level="kernel")
    for metric in ("error_mean", "error_max"):
        reference = dense_errors[metric, DENSE].reindex(keys)  # 0 where no neuron fires: the ratio has no meaning then
        frame[metric] = (
            sparse_errors[metric, SPARSE].reindex(kernels.index).to_numpy() / reference.where(reference > 0).to_numpy()
        )
    facts = bench.groupby("case")[["nnz_mean", "repeats"]].min()
    frame[["nnz_mean", "repeats"]] = facts.reindex(frame["case"]).to_numpy()
    return frame.sort_values("case", key=lambda names: names.map(order), kind="stable", ignore_index=True)


def layer_sums(frame: pd.DataFrame) -> pd.DataFrame:
    """Return ratios of times that are summed over layers before they are divided: a row an input and number of rows.

    frame: as `cases` returns it. Columns: input, rows, weights, graph, layers, ratio, low, high (the least and greatest
    of a layer), repeats (the least number of turns behind a median).
    """
    grouped = frame[frame["layer"] >= 0].groupby(["input", "rows", "weights", "graph"], sort=False)
    sums = grouped.agg(
        dense_us=("dense_us", "sum"),
        sparse_us=("sparse_us", "sum"),
        layers=("layer", "nunique"),
        low=("ratio", "min"),
        high=("ratio", "max"),
        repeats=("repeats", "min"),
    )
    return sums.assign(ratio=sums["dense_us"] / sums["sparse_us"]).reset_index()
