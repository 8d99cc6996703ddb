"""The figure of the Layers page: how nnz spreads over tokens, and what each layer carries, in one row a layer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twell.app.activity.layer_data import span
from twell.app.ui.figures.plot_style import ZERO, finish, layer_axis, panel_title, zero_log_axis
from twell.app.ui.formatting import number, percent
from twell.app.ui.theme import BLUE, GREY


def ridges(bins: pd.DataFrame, by_layer: pd.DataFrame) -> go.Figure:
    """Each layer's distribution of nnz (spread), its share of the model's nnz, and its dead neurons, in one row a
    layer."""
    layers = [int(layer) for layer in by_layer["layer"]]
    known = bool(by_layer["dead_share"].notna().any())
    widths = [0.62, 0.19, 0.19] if known else [0.7, 0.3]
    figure = make_subplots(rows=1, cols=len(widths), shared_yaxes=True, column_widths=widths, horizontal_spacing=0.03)
    high = float(by_layer["max"].max())
    curves = {layer: _density(part) for layer, part in bins.groupby("layer")}
    peak = max((float(y.max()) for _, y, _ in curves.values() if len(y)), default=1.0) or 1.0
    ridge: dict[str, list[Any]] = {"x": [], "y": [], "text": []}  # one trace: each begins and ends on its layer's line
    for layer in layers:
        x, y, spans = curves[layer]
        ridge["x"] += [x[0], *x, x[-1], None]
        ridge["y"] += [layer, *(layer - 1.5 * y / peak), layer, None]
        ridge["text"] += ["", *(f"layer {layer}<br>{span}" * bool(span) for span in spans), "", None]
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
    _means(figure, by_layer)
    _used(figure, by_layer)
    said = [f"{number(m)} · {percent(s)}" for m, s in zip(by_layer["mean"], by_layer["share"], strict=True)]
    _bars(figure, 2, layers, by_layer["mean"], said, BLUE)
    if known:
        _bars(figure, 3, layers, by_layer["dead_share"], [percent(v) for v in by_layer["dead_share"]], GREY)
    finish(figure, 100 + max(18, min(46, 900 // len(layers))) * len(layers), top=36, left=40)
    zero_log_axis(figure, high, "nnz of a token, neurons", row=1, col=1)
    layer_axis(figure, layers)
    figure.update_yaxes(range=[max(layers) + 0.6, min(layers) - 1.6])
    figure.update_yaxes(showgrid=False, col=2)
    figure.update_yaxes(showgrid=False, col=3)
    names = ("distribution over tokens, ● mean", "mean nnz · share of all", "dead neurons")[: len(widths)]
    notes = [panel_title(name, column, above=26) for column, name in enumerate(names, start=1)]
    figure.update_layout(annotations=notes)
    return figure


def _bars(figure: go.Figure, column: int, layers: list[int], values: pd.Series, said: list[str], color: str) -> None:
    """A bar a layer, its value written at the end."""
    lengths = values.fillna(0).to_numpy(float)
    figure.add_bar(
        y=layers,
        x=lengths,
        orientation="h",
        marker={"color": color, "opacity": 0.75},
        width=0.5,
        text=said,
        textposition="outside",
        cliponaxis=False,
        hovertemplate="layer %{y:.0f}: %{text}<extra></extra>",
        row=1,
        col=column,
    )
    room = [0, max(lengths.max(), 1e-9) * (2.0 if column == 2 else 1.5)]
    figure.update_xaxes(range=room, showticklabels=False, showgrid=False, row=1, col=column)


def _means(figure: go.Figure, by_layer: pd.DataFrame) -> None:
    """A dot at each layer's mean; its quantiles under the pointer."""
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


def _used(figure: go.Figure, by_layer: pd.DataFrame) -> None:
    """A ring at the mean of the fired neurons that a ReLU on the up branch leaves."""
    if "used" not in by_layer or not by_layer["used"].notna().any():
        return
    figure.add_scatter(
        x=np.maximum(by_layer["used"], ZERO),
        y=by_layer["layer"],
        mode="markers",
        marker={"color": BLUE, "size": 9, "symbol": "circle-open", "line": {"width": 1.5}},
        hovertemplate="layer %{y:.0f}: %{x:.4g} with a product that is not zero<extra></extra>",
        row=1,
        col=1,
    )


def _density(bins: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Share of a layer's tokens per unit of log nnz, from its bins (spread); 0 is a bin of its own at `ZERO`."""
    low, high, share = (bins[name].to_numpy(float) for name in ("nnz_from", "nnz_to", "share"))
    inner = low[1:], high[1:]
    widths = np.concatenate([[math.log(2)], np.log((inner[1] + 1) / inner[0])])
    x = np.concatenate([[ZERO * 0.82, ZERO], np.sqrt(inner[0] * inner[1])])
    y = np.concatenate([[0.0], share / widths])
    spans = [
        "",
        *(f"nnz {span(row.nnz_from, row.nnz_to)}: {percent(row.share)} of tokens" for row in bins.itertuples()),
    ]
    last = np.flatnonzero(y)[-1] + 2  # nothing is drawn past the largest count
    return x[:last], y[:last], spans[:last]
