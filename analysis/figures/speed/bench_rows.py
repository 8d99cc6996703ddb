"""The tables behind the figures of `twell bench`: times of whole FFNs, and where they break even.

The `bench` table of a run has one figure a row. Here a row is one operation in one case, with its speedup over the
dense operation of the same case. Cost: milliseconds.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.workbench.run.store import Run

SETTING = ["ffn", "rows", "dtype", "weights", "device"]  # times are compared only if all of these are equal
CASE = ["case", *SETTING]
BASELINES = {"ffn_dense": "dense", "ffn_compiled": "dense (compiled)", "ffn_fused": "dense (gate and up fused)"}
PROBES = {"ffn_counts": "counting", "ffn_neurons": "neuron sums", "ffn_packed": "TwELL handed out"}
SYNTHETIC_INPUTS = ("even", "heavy", "dense")
STAGES = ("gate", "up_down")  # a kernel's FFN in two operations
STAGES_SUMMED = "ffn_stages"  # stands in for an FFN that was timed stage by stage only


def ffn_times(run: Run) -> pd.DataFrame:
    """Return the time of each whole FFN in each case, one row an operation and case.

    Where a kernel was timed stage by stage only (recorded patterns of many rows), its row is the sum of the stages.

    Args:
        run: a run with a `bench` table. Cases of another FFN width than the run's are left out.

    Returns:
        Columns: case, input, layer, ffn, rows, dtype, weights, device; operation (dense, …, or the kernel and its
        variant); sparse (whether it is a kernel without a probe, the reference excepted); nnz_mean (neurons); us, low,
        high (µs: median, shortest and longest repeat); speedup (dense time over this time); error_max (relative);
        repeats.
    """
    bench = run.frame("bench")
    bench = bench[bench["d_ff"] == run.d_ff]
    timings = bench[bench["metric"] == "microseconds"]
    ffns = pd.concat([timings[timings["op"].str.startswith("ffn_")], _summed_stages(timings)], ignore_index=True)
    dense_us = ffns[ffns["op"] == "ffn_dense"].groupby(CASE)["value"].median()
    ffns["speedup"] = dense_us.reindex(pd.MultiIndex.from_frame(ffns[CASE])).to_numpy() / ffns["value"]
    keys = [*CASE, "kernel", "op", "compression"]
    errors = bench[bench["metric"] == "error_max"].drop_duplicates(keys).set_index(keys)["value"]
    ffns["error_max"] = errors.reindex(pd.MultiIndex.from_frame(ffns[keys])).to_numpy()
    # A kernel's name carries its compression only if one setting has the kernel at several compressions.
    ambiguous = ffns.groupby([*SETTING, "kernel"])["compression"].transform("nunique") > 1
    names = [
        _operation_name(row.op, row.kernel, row.compression if is_ambiguous else 0)
        for row, is_ambiguous in zip(ffns.itertuples(), ambiguous, strict=True)
    ]
    ffns["operation"] = pd.Series(names, ffns.index, dtype=object)  # of text even if there are none
    ffns["sparse"] = ffns["op"].isin(("ffn_sparse", STAGES_SUMMED)) & (ffns["kernel"] != "reference")
    columns = "case input layer ffn rows dtype weights device operation sparse nnz_mean us low high speedup error_max"
    return ffns.rename(columns={"value": "us"})[[*columns.split(), "repeats"]]


def _summed_stages(timings: pd.DataFrame) -> pd.DataFrame:
    """Return, for each case and kernel that was timed stage by stage only, one row with the sum of its stages."""
    keys = [*CASE, "kernel", "compression"]
    stages = timings[timings["op"].isin(STAGES) & (timings["kernel"] != "torch")]
    timed_whole = pd.MultiIndex.from_frame(timings.loc[timings["op"] == "ffn_sparse", keys])
    stages = stages[~pd.MultiIndex.from_frame(stages[keys]).isin(timed_whole)]
    stages = stages[stages.groupby(keys)["op"].transform("nunique") == len(STAGES)]
    sums = {"value": "sum", "low": "sum", "high": "sum", "repeats": "min"}
    constants = {name: "first" for name in ("input", "layer", "nnz_mean")}
    return stages.groupby(keys, sort=False, as_index=False).agg(sums | constants).assign(op=STAGES_SUMMED)


def _operation_name(op: str, kernel: str, compression: int) -> str:
    """Return an operation's name in the legend; `compression` is 0 if the name leaves it out."""
    if op in BASELINES:
        return BASELINES[op]
    name = f"{kernel} kernel" + (f", compression {compression}" if compression else "")
    if op == STAGES_SUMMED:
        return f"{name} (gate product, then up and down)"
    return f"{name}, {PROBES[op]}" if op in PROBES else name


def by_setting(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of `ffn_times` by setting, under the setting's name: the one with most cases first; of those with
    equally many, the one measured last."""
    groups = {}
    name_ffn = frame["ffn"].nunique() > 1
    for (ffn, rows, dtype, weights, device), group in frame.groupby(SETTING, sort=False):
        groups[f"{rows:,} rows, {dtype}, {weights} weights, {device}" + (f", {ffn} FFN" if name_ffn else "")] = group
    return dict(sorted(reversed(groups.items()), key=lambda group: -group[1]["case"].nunique()))


def of_setting(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the rows of `ffn_times` in one setting, named as in `by_setting`."""
    return by_setting(frame)[name]


def layer_cases(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `ffn_times` about the model's layers: those on text if there are any, otherwise all."""
    layers = frame[frame["layer"] >= 0]
    on_text = layers[layers["input"] == "text"]
    return on_text if len(on_text) else layers


def synthetic_cases(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `ffn_times` on synthetic inputs."""
    return frame[frame["input"].isin(SYNTHETIC_INPUTS)]


def break_even_nnz(frame: pd.DataFrame) -> float | None:
    """Return the nnz, in neurons, at which one kernel takes as long as dense; None if no two cases lie on either side.

    Args:
        frame: the rows of one kernel in one setting (`ffn_times`). Only those on synthetic inputs are used; between
            the two neighbouring cases the ratio of times is taken as linear in nnz.
    """
    cases = synthetic_cases(frame).sort_values("nnz_mean")
    nnz, ratio = cases["nnz_mean"].to_numpy(float), 1 / cases["speedup"].to_numpy(float)
    crossings = np.flatnonzero((ratio[:-1] < 1) & (ratio[1:] >= 1))
    if not len(crossings):
        return None
    k = int(crossings[-1])
    return float(nnz[k] + (1 - ratio[k]) / (ratio[k + 1] - ratio[k]) * (nnz[k + 1] - nnz[k]))
