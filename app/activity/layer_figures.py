"""The figure of the Layers page: a row a layer with the distribution of nnz, the layer's share of it, and dead
neurons."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twell.app.activity.layer_data import number_range
from twell.app.ui.figures.plot_style import ZERO, finish, layer_axis, panel_title, zero_log_axis
from twell.app.ui.formatting import number, percent
from twell.app.ui.theme import BLUE, GREY


def ridges(bins: pd.DataFrame, by_layer: pd.DataFrame) -> go.Figure:
    """Return a figure with a row a layer: the distribution of nnz, the mean and its share of the model's, dead neurons.

    Args:
        bins: the rows of `nnz_bins`.
        by_layer: the rows of `analysis.by_layer`. Without `dead_share` values, the panel of dead neurons is left out.
    """
    layers = [int(layer) for layer in by_layer["layer"]]
    has_dead = bool(by_layer["dead_share"].notna().any())
    widths = [0.62, 0.19, 0.19] if has_dead else [0.7, 0.3]
    figure = make_subplots(rows=1, cols=len(widths), shared_yaxes=True, column_widths=widths, horizontal_spacing=0.03)
    high = float(by_layer["max"].max())
    curves = {layer: _density(rows) for layer, rows in bins.groupby("layer")}
    peak = max((float(y.max()) for _, y, _ in curves.values() if len(y)), default=1.0) or 1.0
    ridge: dict[str, list[Any]] = {
        "x": [],
        "y": [],
        "text": [],
    }  # one trace; each ridge begins and ends on its layer's line
    for layer in layers:
        x, y, tooltips = curves[layer]
        ridge["x"] += [x[0], *x, x[-1], None]
        ridge["y"] += [layer, *(layer - 1.5 * y / peak), layer, None]
        ridge["text"] += ["", *(f"layer {layer}<br>{text}" * bool(text) for text in tooltips), "", None]
    figure.add_scatter(
        **ridge,
        mode="lines",
        line={"color": BLUE, "width": 1.2},
        fill="toself",
        fillcolor="rgba(47, 126, 216, 0.22)",
        hoveron="points",
        hoverinfo="text",
        row=1,
        col=1,
    )
    _mark_means(figure, by_layer)
    _mark_used_means(figure, by_layer)
    labels = [
        f"{number(mean)} · {percent(share)}" for mean, share in zip(by_layer["mean"], by_layer["share"], strict=True)
    ]
    _bars(figure, 2, layers, by_layer["mean"], labels, BLUE)
    if has_dead:
        _bars(figure, 3, layers, by_layer["dead_share"], [percent(v) for v in by_layer["dead_share"]], GREY)
    finish(figure, 100 + max(18, min(46, 900 // len(layers))) * len(layers), top=36, left=40)
    zero_log_axis(figure, high, "nnz of a token, neurons", row=1, col=1)
    layer_axis(figure, layers)
    figure.update_yaxes(range=[max(layers) + 0.6, min(layers) - 1.6])
    figure.update_yaxes(showgrid=False, col=2)
    figure.update_yaxes(showgrid=False, col=3)
    names = ("distribution over tokens, ● mean", "mean nnz · share of total", "dead neurons")[: len(widths)]
    notes = [panel_title(name, column, above=26) for column, name in enumerate(names, start=1)]
    figure.update_layout(annotations=notes)
    return figure


def _bars(figure: go.Figure, column: int, layers: list[int], values: pd.Series, labels: list[str], color: str) -> None:
    """Add a bar a layer to panel `column`, with its label at the end."""
    lengths = values.fillna(0).to_numpy(float)
    figure.add_bar(
        y=layers,
        x=lengths,
        orientation="h",
        marker={"color": color, "opacity": 0.75},
        width=0.5,
        text=labels,
        textposition="outside",
        cliponaxis=False,
        hovertemplate="layer %{y:.0f}: %{text}<extra></extra>",
        row=1,
        col=column,
    )
    label_room = 2.0 if column == 2 else 1.5  # × the longest bar
    figure.update_xaxes(
        range=[0, max(lengths.max(), 1e-9) * label_room],
        showticklabels=False,
        showgrid=False,
        row=1,
        col=column,
    )


def _mark_means(figure: go.Figure, by_layer: pd.DataFrame) -> None:
    """Add a dot at each layer's mean, with the quantiles in its tooltip."""
    figure.add_scatter(
        x=np.maximum(by_layer["mean"], ZERO),
        y=by_layer["layer"],
        mode="markers",
        marker={"color": BLUE, "size": 7},
        customdata=by_layer[["sd", "p10", "p50", "p90", "p99", "max"]],
        hovertemplate="layer %{y:.0f}: mean %{x:.4g}, sd %{customdata[0]:.3g}<br>p10 %{customdata[1]:.0f} · "
        "p50 %{customdata[2]:.0f} · p90 %{customdata[3]:.0f} · p99 %{customdata[4]:.0f} · max %{customdata[5]:.0f}"
        "<extra></extra>",
        row=1,
        col=1,
    )


def _mark_used_means(figure: go.Figure, by_layer: pd.DataFrame) -> None:
    """Add a ring at the mean number of neurons that the second ReLU, on the up branch, leaves; nothing without one."""
    if "used" not in by_layer or not by_layer["used"].notna().any():
        return
    figure.add_scatter(
        x=np.maximum(by_layer["used"], ZERO),
        y=by_layer["layer"],
        mode="markers",
        marker={"color": BLUE, "size": 9, "symbol": "circle-open", "line": {"width": 1.5}},
        hovertemplate="layer %{y:.0f}: %{x:.4g} with a nonzero product<extra></extra>",
        row=1,
        col=1,
    )


def _density(bins: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return the ridge of one layer: x (nnz), y (share of tokens per unit of log nnz), and a tooltip for each point.

    Args:
        bins: the layer's rows of `nnz_bins`. The bin of nnz 0, the first, is drawn at ZERO.
    """
    low, high, share = (bins[name].to_numpy(float) for name in ("nnz_from", "nnz_to", "share"))
    low, high = low[1:], high[1:]
    widths = np.concatenate([[math.log(2)], np.log((high + 1) / low)])
    x = np.concatenate([[ZERO * 0.82, ZERO], np.sqrt(low * high)])
    y = np.concatenate([[0.0], share / widths])
    tooltips = [
        "",
        *(f"nnz {number_range(row.nnz_from, row.nnz_to)}: {percent(row.share)} of tokens" for row in bins.itertuples()),
    ]
    end = np.flatnonzero(y)[-1] + 2  # nothing is drawn past the largest count
    return x[:end], y[:end], tooltips[:end]
