"""The figures of `twell bench` on the Kernels page. They appear as soon as the first case is measured."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from twell.analysis.figures.speed.bench import curve_height, speed_by_nnz, time_by_layer
from twell.analysis.figures.speed.bench_beside import beside_bench
from twell.analysis.figures.speed.bench_rows import (
    break_even_nnz,
    by_setting,
    ffn_times,
    layer_cases,
    of_setting,
    synthetic_cases,
)
from twell.analysis.memo import built_once
from twell.app.ui import widgets
from twell.app.ui.formatting import number, percent, plural, times, typeset, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import one_of, url_param
from twell.workbench.run.store import Run


def draw_bench(run: Run) -> None:
    """Draw the times of every FFN by layer and by nnz; nothing if the run has no benchmark."""
    if not run.has("bench"):
        return
    groups = by_setting(fetch(run, ffn_times))
    if not groups:
        return
    names = list(groups)
    setting = names[0]
    if len(names) > 1:
        chosen = url_param("setting", setting, one_of(names))
        setting = str(st.selectbox("Measured with", names, format_func=typeset, width=420, **chosen))
    conditions = f"{typeset(setting)}. " if len(names) == 1 else ""  # with several, the choice above shows the setting
    result = query(run, ffn_times).then(of_setting, setting)
    layer_result, synthetic_result = result.then(layer_cases), result.then(synthetic_cases)
    layers, synthetic = layer_result.frame, synthetic_result.frame
    sparse = synthetic[synthetic["sparse"]]
    has_curve = sparse["nnz_mean"].nunique() > 1
    if len(layers) and has_curve:
        left, right = widgets.pair("pair-bench")
    else:
        left = right = st.container()
    if len(layers):
        with left:
            source = "Recorded activation patterns. " if (layers["input"] == "patterns").all() else ""
            caption = f"{source}{total_speedups(layers, run.layers)} {conditions}{repeats(layers)}. {beside_bench(run)}"
            widgets.heading("Measured side by side", caption, layer_result)
            widgets.draw(built_once(time_by_layer, layers), "bench-layers", "Time of each FFN operation by layer")
    if has_curve:
        height = curve_height(layers)
        with right:
            caption = f"{conditions}Dense time / sparse time on synthetic inputs. {break_even_sentences(run, sparse)}"
            widgets.heading("Where it breaks even", caption, synthetic_result)
            widgets.draw(
                built_once(speed_by_nnz, sparse, height), "bench-nnz", "Speedup over dense by nnz on synthetic inputs"
            )


def total_speedups(layers: pd.DataFrame, of: int) -> str:
    """Return a sentence with each operation's speedup over dense, summed over the layers that have both.

    Args:
        layers: rows of `ffn_times` about layers, in one setting.
        of: how many layers the model has. Where fewer were timed, they are named.
    """
    speedups, layer_count = [], layers["layer"].nunique()
    for operation, rows in layers[layers["operation"] != "dense"].groupby("operation", sort=False):
        dense_us, timed_count = (rows["us"] * rows["speedup"]).sum(), rows["layer"].nunique()
        subset = "" if timed_count == layer_count else f" (over the {plural(timed_count, 'layer')} where it was timed)"
        speedups.append(f"{operation} {times(dense_us / rows['us'].sum())}{subset}")
    if not speedups:
        return "Only dense was timed."
    named = ", ".join(f"L{layer}" for layer in sorted(layers["layer"].unique()))
    where = f"all {plural(of, 'layer')}" if layer_count == of else f"{layer_count} of {plural(of, 'layer')} ({named})"
    rows = whole(layers["rows"].iloc[0])
    return f"Speedup over dense in twell bench, {where} together at {rows} rows a call: {', '.join(speedups)}."


def repeats(frame: pd.DataFrame) -> str:
    """Return how often each operation was timed, as a sentence without its full stop."""
    low, high = int(frame["repeats"].min()), int(frame["repeats"].max())
    count = plural(low, "repeat") if low == high else f"{low} to {high} repeats"
    return f"Medians of {count}, operations alternating on the same input"


def break_even_sentences(run: Run, sparse: pd.DataFrame) -> str:
    """Return a sentence for each kernel with the sparsity at which it takes as long as dense.

    Args:
        run: the run, whose FFN width turns nnz into sparsity.
        sparse: rows of `ffn_times` on synthetic inputs, of kernels alone. Heavy-tailed inputs are left out if there
            are even ones, which are the harder case.
    """
    sentences = []
    if (sparse["input"] == "even").any():
        sparse = sparse[sparse["input"] != "heavy"]
    for operation, rows in sparse.groupby("operation", sort=False):
        nnz = break_even_nnz(rows)
        if nnz is not None:
            sentences.append(
                f"The {operation} takes as long as dense at about {number(nnz, 2)} of {whole(run.d_ff)} neurons, a "
                f"sparsity of {percent(1 - nnz / run.d_ff)}."
            )
        elif (rows["speedup"] > 1).all():
            highest = float(rows["nnz_mean"].max())
            sentences.append(
                f"The {operation} is faster at every nnz measured, up to {number(highest)} of {whole(run.d_ff)}."
            )
        else:
            sentences.append(f"The {operation} is not faster at every nnz measured.")
    return " ".join(sentences)
