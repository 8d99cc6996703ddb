"""The figures of `twell bench`: the time of every FFN by layer, and speedup against nnz on synthetic inputs."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from twell.analysis.figures.labels import times
from twell.analysis.figures.speed.timings import figure_height, time_unit
from twell.analysis.figures.style import (
    AMBER,
    BLUE,
    DOTTED,
    GREY,
    LEGEND_ABOVE,
    finish,
    layer_axis,
    log_axis,
    log_ticks,
    whiskers,
)

FAINT = "rgba(139, 149, 161, 0.45)"
OPEN = {"size": 11, "line": {"width": 2}}
BASELINE_MARKERS: dict[str, dict[str, Any]] = {
    "dense": {"color": GREY, "symbol": "circle-open", **OPEN},
    "dense (compiled)": {"color": GREY, "symbol": "square-open", **OPEN},
    "dense (gate and up fused)": {"color": GREY, "symbol": "diamond-open", **OPEN},
}
REFERENCE_MARKER = {"color": GREY, "symbol": "x-thin-open", **OPEN}
KERNEL_MARKERS = (
    {"color": BLUE, "size": 9},
    {"color": AMBER, "size": 9},
    {"color": BLUE, "size": 9, "symbol": "diamond"},
)


def markers(operations: list[str]) -> dict[str, dict[str, Any]]:
    """Return a plotly marker for each operation, by its name."""
    unused = iter(KERNEL_MARKERS * 8)
    return {
        name: BASELINE_MARKERS.get(name) or (REFERENCE_MARKER if name.startswith("reference") else next(unused))
        for name in operations
    }


def time_by_layer(frame: pd.DataFrame) -> go.Figure:
    """Return a dot an operation and layer with its time, and a line from its shortest to its longest repeat.

    Args:
        frame: the rows of `ffn_times` about layers, in one setting. The speedup of the layer's fastest kernel stands
            at the right.
    """
    layers = sorted(int(layer) for layer in frame["layer"].unique())
    lines = {layer: number for number, layer in enumerate(layers)}  # a bench may have left out layers between them
    unit, scale = time_unit(float(frame["us"].max()))
    figure = go.Figure()
    for operation, marker in markers(list(dict.fromkeys(frame["operation"]))).items():
        rows = frame[frame["operation"] == operation]
        figure.add_scatter(
            x=rows["us"] * scale,
            y=rows["layer"].map(lines),
            mode="markers",
            marker=marker,
            name=operation,
            error_x=whiskers(
                rows["low"].fillna(rows["us"]) * scale,
                rows["us"] * scale,
                rows["high"].fillna(rows["us"]) * scale,
                thickness=1,
                color=FAINT,
            ),
            customdata=rows[["speedup", "nnz_mean", "repeats", "layer"]],
            hovertemplate=f"layer %{{customdata[3]:.0f}}, {operation}: %{{x:,.4g}} {unit}, "
            "%{customdata[0]:.3g} × dense<br>mean nnz %{customdata[1]:.3g}, repeats: %{customdata[2]}<extra></extra>",
        )
    finish(figure, figure_height(len(layers)) + 60, right=76, left=44, top=80, bottom=60)
    figure.update_layout(showlegend=True, legend=LEGEND_ABOVE)
    layer_axis(figure, layers, evenly=True)
    best = frame[frame["sparse"]].groupby("layer")["speedup"].max()
    at_right = {"xref": "paper", "x": 1, "xshift": 8, "xanchor": "left", "showarrow": False, "font": {"size": 12}}
    gains = [{**at_right, "text": times(gain), "y": lines[layer]} for layer, gain in best.items()]
    figure.update_layout(annotations=gains)
    low, high = float(frame["us"].min()) * scale, float(frame["us"].max()) * scale
    is_log = high > 20 * low
    if is_log:
        ticks, labels = log_ticks(low, high)
        figure.update_xaxes(type="log", tickvals=ticks, ticktext=labels)
    # The axis covers the medians only: a repeat that another program disturbed may lie far outside.
    limits = [math.log10(low / 1.2), math.log10(high * 1.2)] if is_log else [0, high * 1.25]
    figure.update_xaxes(title=f"{unit} per call: median;<br>line from shortest to longest repeat", range=limits)
    return figure


def curve_height(layers: pd.DataFrame) -> int:
    """Return the height in pixels of `speed_by_nnz` beside `time_by_layer` of these rows."""
    return min(figure_height(layers["layer"].nunique()) + 60, 440)


def speed_by_nnz(frame: pd.DataFrame, height: int) -> go.Figure:
    """Return speedup over dense against the mean nnz of synthetic inputs, a line a kernel and kind of input.

    Args:
        frame: the rows of `ffn_times` on synthetic inputs, in one setting.
        height: in pixels.
    """
    figure = go.Figure()
    frame = frame[frame["nnz_mean"] > 0].sort_values("nnz_mean")
    # The input "dense" (every neuron fires) belongs to the even rows: all of its rows have the same nnz.
    frame = frame.assign(is_heavy=frame["input"] == "heavy")
    for operation, marker in markers(list(dict.fromkeys(frame["operation"]))).items():
        for is_heavy, rows in frame[frame["operation"] == operation].groupby("is_heavy"):
            name = f"{operation}, heavy-tailed rows" if is_heavy else f"{operation}, even rows"
            figure.add_scatter(
                x=rows["nnz_mean"],
                y=rows["speedup"],
                mode="lines+markers",
                line={"color": marker["color"], "width": 1.4, "dash": "dot" if is_heavy else "solid"},
                marker=marker,
                name=name,
                hovertemplate=f"{name}: nnz %{{x:.4g}}, %{{y:.3g}} × dense<extra></extra>",
            )
    finish(figure, height, top=80)
    figure.update_layout(showlegend=True, legend=LEGEND_ABOVE)
    figure.add_hline(y=1, line=DOTTED)
    low, high = float(frame["nnz_mean"].min()), float(frame["nnz_mean"].max())
    log_axis(figure, low / 1.3, high * 1.3, "mean nnz, neurons")
    figure.update_yaxes(title="speedup, × dense", range=[0, max(1.15, float(frame["speedup"].max()) * 1.1)])
    return figure
