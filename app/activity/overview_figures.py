"""The figure of the Overview: a row a layer, and side by side where in a sequence it fires, how much, how many of its
neurons never do, and what its sparsity buys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twell.app.ui.figures.plot_style import finish, layer_axis, log_ticks, panel_title, spans
from twell.app.ui.formatting import number, percent, times, whole
from twell.app.ui.theme import BLUE, GREY, SCALE

FEW = 16  # layers whose values are written out


def layer_by_layer(blocks: pd.DataFrame, layers: pd.DataFrame, speedup: pd.DataFrame | None) -> go.Figure:
    """`blocks` (position_blocks) as a heat map; beside it each layer's nnz over tokens and its dead neurons (by_layer),
    and its dense over sparse time (speedup), as far as they are known."""
    rows = [int(layer) for layer in layers["layer"]]
    few = len(rows) <= FEW
    panels: list[tuple[str, float, Callable[[int], Any]]] = [
        ("mean nnz by position", 0.54, lambda column: _map(figure, blocks, few, column)),
        ("nnz: mean, p10 to p90", 0.22, lambda column: _spread(figure, layers, column)),
    ]
    if "dead_share" in layers and layers["dead_share"].notna().any():
        panels.append(("never fired", 0.12, lambda column: _bars(figure, layers, "dead_share", percent, GREY, column)))
    if speedup is not None and len(speedup):
        panels.append(("FFN speedup", 0.12, lambda column: _bars(figure, speedup, "speedup", times, BLUE, column)))
    figure = make_subplots(
        rows=1, cols=len(panels), shared_yaxes=True, column_widths=[p[1] for p in panels], horizontal_spacing=0.022
    )
    for column, (_name, _width, put) in enumerate(panels, start=1):
        put(column)
    finish(figure, 92 + (30 if few else 18 if len(rows) <= 32 else 12) * len(rows), top=34, left=40, right=8, bottom=46)
    layer_axis(figure, rows)
    figure.update_yaxes(range=[max(rows) + 0.5, min(rows) - 0.5], showgrid=False)
    figure.update_yaxes(showgrid=True, col=2)
    figure.update_xaxes(title_standoff=8)
    figure.update_layout(annotations=[panel_title(name, column) for column, (name, *_) in enumerate(panels, start=1)])
    return figure


def _map(figure: go.Figure, blocks: pd.DataFrame, few: bool, column: int) -> None:
    """Mean nnz by layer and block of positions, shades logarithmic; the values in it, or else a scale beside it."""
    frame = blocks.sort_values(["layer", "position_from"])
    table = frame.pivot(index="layer", columns="position_from", values="mean")
    relative = frame.pivot(index="layer", columns="position_from", values="relative")
    spans = frame.drop_duplicates("position_from").set_index("position_from")["position_to"]
    starts = [whole(start) for start in table.columns]
    names = [
        a if start == spans[start] else f"{a}–{whole(spans[start])}"
        for a, start in zip(starts, spans.index, strict=True)
    ]
    values = table.to_numpy(float)
    shown = np.log10(np.maximum(values, 1e-3))
    low, high = float(np.nanmin(shown)), float(np.nanmax(shown))
    figure.add_heatmap(
        z=shown,
        x=list(range(len(starts))),
        y=[int(layer) for layer in table.index],
        colorscale=SCALE,
        zmin=low,
        zmax=high,
        xgap=1,
        ygap=1,
        text=[[number(v, 2) if v < 100 else whole(v) for v in row] for row in values] if few else None,
        texttemplate="%{text}" if few else None,
        textfont={"size": 11},
        customdata=np.dstack([values, relative.to_numpy(float)]),
        hovertext=[names] * len(values),
        hovertemplate="layer %{y:.0f}, position %{hovertext}<br>mean nnz %{customdata[0]:.3g}<br>"
        "%{customdata[1]:.2f} × the layer's mean<extra></extra>",
        showscale=not few,
        colorbar=None if few else _color_scale(low, high, right=figure.layout.xaxis.domain[1]),
        row=1,
        col=column,
    )
    every = 1 if max(len(start) for start in starts) <= 5 else 2
    figure.update_xaxes(
        tickvals=list(range(0, len(starts), every)),
        ticktext=starts[::every],
        showgrid=False,
        tickangle=0,
        title="position in the sequence, from",
        row=1,
        col=column,
    )


def _color_scale(low: float, high: float, right: float) -> dict[str, object]:
    """Return the color bar of a logarithmic map from 10^low to 10^high, above the panel that ends at `right`."""
    ticks, text = log_ticks(10**low, 10**high)
    return {
        "orientation": "h",
        "tickvals": [math.log10(tick) for tick in ticks],
        "ticktext": text,
        "ticklabelposition": "inside",
        "thickness": 12,
        "outlinewidth": 0,
        "xpad": 0,
        "len": 0.2,
        "x": right,
        "xanchor": "right",
        "y": 1,
        "yanchor": "bottom",
    }


def _spread(figure: go.Figure, layers: pd.DataFrame, column: int) -> None:
    """A dot at the mean over a line between the quantiles, logarithmic from 1 up."""
    low, high = np.maximum(layers["p10"], 1), np.maximum(layers["p90"], 1)
    mean = np.maximum(layers["mean"], 1)
    figure.add_scatter(
        **spans(low, high, layers["layer"]),
        mode="lines",
        line={"color": BLUE, "width": 5},
        opacity=0.3,
        hoverinfo="skip",
        row=1,
        col=column,
    )
    figure.add_scatter(
        x=mean,
        y=layers["layer"],
        mode="markers+text",
        marker={"color": BLUE, "size": 8},
        text=[number(value) for value in layers["mean"]] if len(layers) <= FEW else None,
        textposition="top center",
        textfont={"size": 10},
        customdata=layers[["mean", "p10", "p50", "p90", "p99", "max"]],
        hovertemplate="layer %{y:.0f}: mean nnz %{customdata[0]:.4g}<br>p10 %{customdata[1]:.0f} · p50 "
        "%{customdata[2]:.0f} · p90 %{customdata[3]:.0f} · p99 %{customdata[4]:.0f} · max %{customdata[5]:.0f}"
        "<extra></extra>",
        row=1,
        col=column,
    )
    ends = float(min(low.min(), mean.min())), float(max(high.max(), mean.max()))
    ticks, text = log_ticks(ends[0] / 1.5, ends[1] * 1.5)
    figure.update_xaxes(
        type="log",
        range=[math.log10(ends[0] / 1.3), math.log10(ends[1] * 1.3)],
        tickvals=ticks,
        ticktext=text,
        title="neurons",
        row=1,
        col=column,
    )


def _bars(
    figure: go.Figure, frame: pd.DataFrame, name: str, said: Callable[[float], str], color: str, column: int
) -> None:
    """A bar a layer, its value beside it."""
    lengths = frame[name].fillna(0).to_numpy(float)
    words = [said(value) for value in frame[name]]
    figure.add_bar(
        y=frame["layer"],
        x=lengths,
        orientation="h",
        marker={"color": color, "opacity": 0.75},
        width=0.5,
        text=words if len(frame) <= FEW else None,
        textposition="outside",
        cliponaxis=False,
        customdata=words,
        hovertemplate="layer %{y:.0f}: %{customdata}<extra></extra>",
        row=1,
        col=column,
    )
    most = max(float(lengths.max()), 1e-9)
    few = len(frame) <= FEW  # else an axis stands in for the values
    figure.update_xaxes(range=[0, most * (1.6 if few else 1.1)], showgrid=False, row=1, col=column)
    ticks = [1.0] * (name == "speedup") if few else [1.0, most] if name == "speedup" else [0.0, most]
    text = ["as dense" if few else said(tick) for tick in ticks]
    figure.update_xaxes(tickvals=ticks, ticktext=text, tickangle=0, row=1, col=column)
    if name == "speedup" and most > 1:
        figure.add_vline(x=1, line={"color": GREY, "width": 1, "dash": "dot"}, row=1, col=column)
