"""What `twell bench` measured, as the Kernels page wants it: times of whole FFNs, and where sparse stops to pay.

A run's `bench` table has one figure a row. Here a row is one operation in one case, with the dense time of the same
case beside it. Cost: milliseconds.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.workbench.run.store import Run

SETTING = ["ffn", "rows", "dtype", "weights", "device"]
CASE = ["case", *SETTING]
BASELINES = {"ffn_dense": "dense", "ffn_compiled": "dense (compiled)", "ffn_fused": "dense (gate and up fused)"}
PROBES = {"ffn_counts": "counting", "ffn_neurons": "neuron sums", "ffn_packed": "TwELL handed out"}
MADE = ("even", "heavy", "dense")
PARTS = ("gate", "up_down")  # of a kernel's FFN
IN_PARTS = "ffn_parts"  # their sum, in the place of an FFN


def measured(run: Run) -> pd.DataFrame:
    """A row an operation and case, of those that are a whole FFN; where a kernel ran its parts alone (recorded patterns
    of many rows), these added up. Columns: case, input, layer, ffn, rows, dtype,
    weights, device; what (dense, …, or the kernel with what was special about it); sparse (a kernel, no
    probe); nnz_mean; us, low, high (µs: median, least and greatest turn); times (dense time / its own); error_max;
    repeats."""
    table = run.frame("bench")
    table = table[table["d_ff"] == run.d_ff]  # a bench of another width may have joined
    took = table[table["metric"] == "microseconds"]
    found = took[took["op"].str.startswith("ffn_")]
    found = pd.concat([found, _in_parts(took)], ignore_index=True)
    dense = found[found["op"] == "ffn_dense"].groupby(CASE)["value"].median()
    found["times"] = dense.reindex(pd.MultiIndex.from_frame(found[CASE])).to_numpy() / found["value"]
    keys = [*CASE, "kernel", "op", "compression"]
    error = table[table["metric"] == "error_max"].drop_duplicates(keys).set_index(keys)["value"]
    found["error_max"] = error.reindex(pd.MultiIndex.from_frame(found[keys])).to_numpy()
    settled = [*SETTING, "kernel"]  # a kernel's compression is named where it was timed at several in one setting
    several = found.groupby(settled)["compression"].transform("nunique") > 1
    found["what"] = [
        _named(row.op, row.kernel, row.compression * more)
        for row, more in zip(found.itertuples(), several, strict=True)
    ]
    found["sparse"] = found["op"].isin(("ffn_sparse", IN_PARTS)) & (found["kernel"] != "reference")
    names = "case input layer ffn rows dtype weights device what sparse nnz_mean us low high times error_max repeats"
    return found.rename(columns={"value": "us"})[names.split()]


def _in_parts(took: pd.DataFrame) -> pd.DataFrame:
    """The parts of each kernel's FFN added up, in the cases that it ran no whole one of."""
    keys = [*CASE, "kernel", "compression"]
    parts = took[took["op"].isin(PARTS) & (took["kernel"] != "torch")]
    whole = pd.MultiIndex.from_frame(took.loc[took["op"] == "ffn_sparse", keys])
    parts = parts[~pd.MultiIndex.from_frame(parts[keys]).isin(whole)]
    parts = parts[parts.groupby(keys)["op"].transform("nunique") == len(PARTS)]
    sums = {"value": "sum", "low": "sum", "high": "sum", "repeats": "min"}
    kept = {name: "first" for name in ("input", "layer", "nnz_mean")}
    return parts.groupby(keys, sort=False, as_index=False).agg(sums | kept).assign(op=IN_PARTS)


def _named(op: str, kernel: str, compression: int) -> str:
    if op in BASELINES:
        return BASELINES[op]
    name = f"{kernel} kernel" + (f", compression {compression}" if compression else "")
    if op == IN_PARTS:
        return f"{name} (gate product, then up and down)"
    return f"{name}, {PROBES[op]}" if op in PROBES else name


def settings(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The rows by what cases have to share to be compared, under its name; the one of most cases comes first, of equals
    the one measured last."""
    groups = {}
    several = frame["ffn"].nunique() > 1
    for (ffn, rows, dtype, weights, device), part in frame.groupby(SETTING, sort=False):
        groups[f"{rows} rows, {dtype}, {weights} weights, {device}" + (f", {ffn} FFN" if several else "")] = part
    return dict(sorted(reversed(groups.items()), key=lambda group: -group[1]["case"].nunique()))


def of_setting(frame: pd.DataFrame, name: str) -> pd.DataFrame:
    """The rows of one of the settings."""
    return settings(frame)[name]


def on_text(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a model's layers: those on text, or where there are none, on whatever they were timed on."""
    layers = frame[frame["layer"] >= 0]
    texts = layers[layers["input"] == "text"]
    return texts if len(texts) else layers


def made_up(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows on made-up inputs."""
    return frame[frame["input"].isin(MADE)]


def equal_at(part: pd.DataFrame) -> float | None:
    """The nnz at which one kernel takes as long as dense, between two cases of made-up inputs that were measured on
    either side of it (linear in time); None where it is faster, or slower, in all of them."""
    made = part[part["input"].isin(MADE)].sort_values("nnz_mean")
    nnz, ratio = made["nnz_mean"].to_numpy(float), 1 / made["times"].to_numpy(float)
    crossed = np.flatnonzero((ratio[:-1] < 1) & (ratio[1:] >= 1))
    if not len(crossed):
        return None
    k = int(crossed[-1])
    return float(nnz[k] + (1 - ratio[k]) / (ratio[k + 1] - ratio[k]) * (nnz[k + 1] - nnz[k]))
