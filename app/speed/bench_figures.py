"""The figures of what `twell bench` measured: every FFN by layer, and speed against nnz on made-up inputs."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from twell.app.speed.timing_figures import height, time_unit
from twell.app.ui.figures.plot_style import finish, layer_axis, log_ticks, whiskers
from twell.app.ui.formatting import times
from twell.app.ui.theme import AMBER, BLUE, GREY

FAINT = "rgba(139, 149, 161, 0.45)"
OPEN = {"size": 11, "line": {"width": 2}}
LOOKS: dict[str, dict[str, Any]] = {
    "dense": {"color": GREY, "symbol": "circle-open", **OPEN},
    "dense (compiled)": {"color": GREY, "symbol": "square-open", **OPEN},
    "dense (gate and up fused)": {"color": GREY, "symbol": "diamond-open", **OPEN},
}
REFERENCE = {"color": GREY, "symbol": "x-thin-open", **OPEN}
KERNELS = ({"color": BLUE, "size": 9}, {"color": AMBER, "size": 9}, {"color": BLUE, "size": 9, "symbol": "diamond"})


def looks(names: list[str]) -> dict[str, dict[str, Any]]:
    """A marker for everything that was timed."""
    free = iter(KERNELS * 8)
    return {name: LOOKS.get(name) or (REFERENCE if name.startswith("reference") else next(free)) for name in names}


def by_layer(frame: pd.DataFrame) -> go.Figure:
    """A dot an operation in every layer, with the span of its turns; at the right, dense over the fastest kernel."""
    layers = sorted(int(layer) for layer in frame["layer"].unique())
    unit, scale = time_unit(float(frame["us"].max()))
    figure = go.Figure()
    for what, marker in looks(list(dict.fromkeys(frame["what"]))).items():
        part = frame[frame["what"] == what]
        figure.add_scatter(
            x=part["us"] * scale,
            y=part["layer"],
            mode="markers",
            marker=marker,
            name=what,
            error_x=whiskers(
                part["low"].fillna(part["us"]) * scale,
                part["us"] * scale,
                part["high"].fillna(part["us"]) * scale,
                thickness=1,
                color=FAINT,
            ),
            customdata=part[["times", "nnz_mean", "repeats"]],
            hovertemplate=f"layer %{{y:.0f}}, {what}: %{{x:,.4g}} {unit}, %{{customdata[0]:.3g}} × dense<br>"
            "mean nnz %{customdata[1]:.3g}, %{customdata[2]} turns<extra></extra>",
        )
    finish(figure, height(len(layers)) + 60, right=76, left=44, top=80)
    figure.update_layout(showlegend=True, legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"})
    layer_axis(figure, layers)
    best = frame[frame["sparse"]].groupby("layer")["times"].max()
    beside = {"xref": "paper", "x": 1, "xshift": 8, "xanchor": "left", "showarrow": False, "font": {"size": 12}}
    figure.update_layout(annotations=[{**beside, "text": times(gain), "y": layer} for layer, gain in best.items()])
    low, high = float(frame["us"].min()) * scale, float(frame["us"].max()) * scale
    if high > 20 * low:
        ticks, text = log_ticks(low, high)
        figure.update_xaxes(type="log", tickvals=ticks, ticktext=text)
    figure.update_xaxes(
        title=f"{unit} per call: median, lines from the least to the greatest turn", range=_span(low, high)
    )
    return figure


def _span(low: float, high: float) -> list[float]:
    """The axis, over the medians: turns that something disturbed run out of it."""
    return [math.log10(low / 1.2), math.log10(high * 1.2)] if high > 20 * low else [0, high * 1.25]


def by_nnz(frame: pd.DataFrame, tall: int) -> go.Figure:
    """Dense over sparse time against the nnz of made-up inputs, a line a kernel; `tall` pixels."""
    figure = go.Figure()
    frame = frame[frame["nnz_mean"] > 0].sort_values("nnz_mean")
    frame = frame.assign(heavy=frame["input"] == "heavy")  # with all neurons firing, rows are even
    for what, marker in looks(list(dict.fromkeys(frame["what"]))).items():
        for heavy, part in frame[frame["what"] == what].groupby("heavy"):
            name = f"{what}, heavy-tailed rows" if heavy else f"{what}, even rows"
            figure.add_scatter(
                x=part["nnz_mean"],
                y=part["times"],
                mode="lines+markers",
                line={"color": marker["color"], "width": 1.4, "dash": "dot" if heavy else "solid"},
                marker=marker,
                name=name,
                hovertemplate=f"{name}: nnz %{{x:.4g}}, %{{y:.3g}} × dense<extra></extra>",
            )
    finish(figure, tall, top=80)
    figure.update_layout(showlegend=True, legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"})
    figure.add_hline(y=1, line={"color": GREY, "width": 1, "dash": "dot"})
    low, high = float(frame["nnz_mean"].min()), float(frame["nnz_mean"].max())
    ticks, text = log_ticks(low / 1.3, high * 1.3)
    figure.update_xaxes(
        type="log",
        title="mean nnz, neurons",
        tickvals=ticks,
        ticktext=text,
        range=[math.log10(low / 1.3), math.log10(high * 1.3)],
    )
    figure.update_yaxes(title="speedup, × dense", range=[0, max(1.15, float(frame["times"].max()) * 1.1)])
    return figure
