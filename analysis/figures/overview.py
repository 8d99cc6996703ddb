"""The Overview's figure: a row a layer, with mean nnz by position, nnz of a token, dead neurons and FFN speedup."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twell.analysis.activity.layers import by_layer
from twell.analysis.activity.positions import position_blocks
from twell.analysis.figures.labels import number, percent, times, whole
from twell.analysis.figures.style import (
    AMBER,
    BLUE,
    DOTTED,
    GREY,
    SCALE,
    ZERO,
    color_bar,
    finish,
    layer_axis,
    log_ticks,
    panel_title,
    spans,
    zero_log_axis,
)
from twell.analysis.speed.potential import layer_potential
from twell.analysis.speed.speedup import speedup
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

MAX_LABELLED = 16  # with more layers, axes and a color scale stand in for the values
BLOCKS = 16  # of positions, each a column of the map


def layer_rows(run: Run) -> pd.DataFrame:
    """Return one row a layer with everything that the figure draws.

    Columns: layer; "nnz from position P" (mean nnz from position P to the next block's); mean, p10, p90 (of a token's
    nnz); dead_share; speedup (dense time / sparse time of the FFN), if a kernel other than the reference was timed, and
    left_ms (what the layer could still gain, of one batch), if it can be told.
    """
    blocks = position_blocks(run, blocks=BLOCKS)
    table = blocks.pivot(index="layer", columns="position_from", values="mean")
    table.columns = [f"nnz from position {start}" for start in table.columns]
    table = table.join(by_layer(run).set_index("layer")[["mean", "p10", "p90", "dead_share"]])
    timed = comparable_speedup(run)
    if timed is not None:
        table = table.join(timed.set_index("layer")[["speedup", *(["left_ms"] if "left_ms" in timed else [])]])
    return table.reset_index()


def comparable_speedup(run: Run) -> pd.DataFrame | None:
    """Return `analysis.speedup`, with left_ms of `layer_potential` if that is known; None if nothing was timed, or only
    the reference kernel."""
    try:
        table = speedup(run)
    except Missing:
        return None
    with suppress(Missing):
        left = layer_potential(run).set_index("layer")["left_ms"]
        table = table.assign(left_ms=left.reindex(table["layer"]).to_numpy())
    return table if table.attrs["comparable"] else None


def layer_by_layer(blocks: pd.DataFrame, layers: pd.DataFrame, speedup: pd.DataFrame | None) -> go.Figure:
    """Return the figure; a panel whose values are unknown is left out.

    Args:
        blocks: the rows of `analysis.position_blocks`, drawn as a heat map.
        layers: the rows of `analysis.by_layer`.
        speedup: the rows of `comparable_speedup`, or None. The bar of the layer with most to gain is amber, as it is
            one of the shortest: a long one is a gain that was made.
    """
    rows = [int(layer) for layer in layers["layer"]]
    labelled = len(rows) <= MAX_LABELLED
    panels: list[tuple[str, float, Callable[[int], Any]]] = [
        ("mean nnz by position", 0.54, lambda column: _add_map(figure, blocks, labelled, column)),
        ("nnz: mean, middle 80 %", 0.22, lambda column: _add_quantiles(figure, layers, column)),
    ]
    if "dead_share" in layers and layers["dead_share"].notna().any():
        panels.append(
            ("never fired", 0.12, lambda column: _add_bars(figure, layers, "dead_share", percent, GREY, column))
        )
    if speedup is not None and len(speedup):
        colors = _speed_colors(speedup)
        panels.append(
            ("FFN speedup", 0.12, lambda column: _add_bars(figure, speedup, "speedup", times, colors, column))
        )
    widths = [width for _, width, _ in panels]
    figure = make_subplots(rows=1, cols=len(panels), shared_yaxes=True, column_widths=widths, horizontal_spacing=0.022)
    for column, (_, _, add_panel) in enumerate(panels, start=1):
        add_panel(column)
    row_height = 30 if labelled else 18 if len(rows) <= 32 else 12
    finish(figure, 92 + row_height * len(rows), top=34, left=40, right=8, bottom=46)
    layer_axis(figure, rows)
    figure.update_yaxes(range=[max(rows) + 0.5, min(rows) - 0.5], showgrid=False)
    figure.update_yaxes(showgrid=True, col=2)
    figure.update_xaxes(title_standoff=8)
    figure.update_layout(annotations=[panel_title(name, column) for column, (name, *_) in enumerate(panels, start=1)])
    return figure


def _add_map(figure: go.Figure, blocks: pd.DataFrame, labelled: bool, column: int) -> None:
    """Add the heat map of mean nnz by layer and block of positions, in logarithmic shades, to panel `column`.

    If `labelled`, the values stand in the cells; if not, a color scale stands above them.
    """
    frame = blocks.sort_values(["layer", "position_from"])
    table = frame.pivot(index="layer", columns="position_from", values="mean")
    relative = frame.pivot(index="layer", columns="position_from", values="relative")
    ends = frame.drop_duplicates("position_from").set_index("position_from")["position_to"]
    starts = [whole(start) for start in table.columns]
    names = [
        name if start == ends[start] else f"{name}–{whole(ends[start])}"
        for name, start in zip(starts, ends.index, strict=True)
    ]
    values = table.to_numpy(float)
    least = np.nanmin(values, where=values > 0, initial=np.nanmax(values))  # zeros, without a logarithm, are as pale
    shades = np.log10(np.maximum(values, max(least, 1e-3)))
    low, high = float(np.nanmin(shades)), float(np.nanmax(shades))
    figure.add_heatmap(
        z=shades,
        x=list(range(len(starts))),
        y=[int(layer) for layer in table.index],
        colorscale=SCALE,
        zmin=low,
        zmax=high,
        xgap=1,
        ygap=1,
        text=[[number(v, 2) if v < 100 else whole(v) for v in row] for row in values] if labelled else None,
        texttemplate="%{text}" if labelled else None,
        textfont={"size": 11},
        customdata=np.dstack([values, relative.to_numpy(float)]),
        hovertext=[names] * len(values),
        hovertemplate="layer %{y:.0f}, position %{hovertext}<br>mean nnz %{customdata[0]:.3g}<br>"
        "%{customdata[1]:.2f} × the layer's mean<extra></extra>",
        showscale=not labelled,
        colorbar=None if labelled else _color_scale(low, high, right=figure.layout.xaxis.domain[1]),
        row=1,
        col=column,
    )
    step = 1 if max(len(start) for start in starts) < 5 else 2  # 800 px have no room for sixteen of five letters
    figure.update_xaxes(
        tickvals=list(range(0, len(starts), step)),
        ticktext=starts[::step],
        showgrid=False,
        tickangle=0,
        title="position in the sequence, from",
        row=1,
        col=column,
    )


def _color_scale(low: float, high: float, right: float) -> dict[str, object]:
    """Return the color bar of a logarithmic map from 10^low to 10^high, above the panel that ends at `right`."""
    ticks, text = log_ticks(10**low, 10**high)
    return color_bar([math.log10(tick) for tick in ticks], text, right)


def _add_quantiles(figure: go.Figure, layers: pd.DataFrame, column: int) -> None:
    """Add a dot at each layer's mean nnz, on a line from p10 to p90, to panel `column`; logarithmic, and 0 at ZERO."""
    low, mean, high = (np.maximum(layers[name], ZERO) for name in ("p10", "mean", "p90"))
    middle = spans(low, high, layers["layer"], line={"color": BLUE, "width": 5}, opacity=0.3)
    figure.add_trace(middle, row=1, col=column)
    figure.add_scatter(
        x=mean,
        y=layers["layer"],
        mode="markers+text",
        marker={"color": BLUE, "size": 8},
        text=[number(value) for value in layers["mean"]] if len(layers) <= MAX_LABELLED else None,
        textposition="top center",
        textfont={"size": 10},
        cliponaxis=False,  # the first layer's stands above the panel
        customdata=layers[["mean", "p10", "p50", "p90", "p99", "max"]],
        hovertemplate="layer %{y:.0f}: mean nnz %{customdata[0]:.4g}<br>p10 %{customdata[1]:.0f} · p50 "
        "%{customdata[2]:.0f} · p90 %{customdata[3]:.0f} · p99 %{customdata[4]:.0f} · max %{customdata[5]:.0f}"
        "<extra></extra>",
        row=1,
        col=column,
    )
    lowest, highest = float(min(low.min(), mean.min())), float(max(high.max(), mean.max()))
    if lowest < 1:
        zero_log_axis(figure, max(highest, 3), "neurons", row=1, col=column)
        return
    ticks, labels = log_ticks(lowest / 1.3, highest * 1.3)
    figure.update_xaxes(
        type="log",
        range=[math.log10(lowest / 1.3), math.log10(highest * 1.3)],
        tickvals=ticks,
        ticktext=labels,
        title="neurons",
        row=1,
        col=column,
    )


def _speed_colors(speedup: pd.DataFrame) -> str | list[str]:
    """Return the color of the bars of speedup, or of each where the layer with most to gain is known."""
    if "left_ms" not in speedup or not speedup["left_ms"].gt(0).any():
        return BLUE
    most = speedup["left_ms"].idxmax()
    return [AMBER if index == most else BLUE for index in speedup.index]


def _add_bars(
    figure: go.Figure,
    frame: pd.DataFrame,
    name: str,
    form: Callable[[float], str],
    color: str | list[str],
    column: int,
) -> None:
    """Add a bar a layer to panel `column`: the values of `frame[name]`, written as `form` returns them."""
    lengths = frame[name].fillna(0).to_numpy(float)
    labels = [form(value) for value in frame[name]]
    labelled = len(frame) <= MAX_LABELLED
    figure.add_bar(
        y=frame["layer"],
        x=lengths,
        orientation="h",
        marker={"color": color, "opacity": 0.75},
        width=0.5,
        text=labels if labelled else None,
        textposition="outside",
        cliponaxis=False,
        customdata=labels,
        hovertemplate="layer %{y:.0f}: %{customdata}<extra></extra>",
        row=1,
        col=column,
    )
    longest = max(float(lengths.max()), 1e-9)
    figure.update_xaxes(range=[0, longest * (1.6 if labelled else 1.1)], showgrid=False, row=1, col=column)
    is_speedup = name == "speedup"
    if is_speedup and labelled:  # in a column of their own, clear of the line of dense
        figure.data[-1].text = None
        ends = [1.04 * longest] * len(frame)
        look = {"mode": "text", "textposition": "middle right", "hoverinfo": "skip", "cliponaxis": False}
        figure.add_scatter(x=ends, y=frame["layer"], text=labels, **look, row=1, col=column)
    if labelled:
        ticks, tick_labels = ([1.0], ["as dense"]) if is_speedup else ([], [])
    else:
        ticks = [1.0 if is_speedup else 0.0, longest]
        tick_labels = [form(tick) for tick in ticks]
    figure.update_xaxes(tickvals=ticks, ticktext=tick_labels, tickangle=0, row=1, col=column)
    if is_speedup and longest > 1:
        figure.add_vline(x=1, line=DOTTED, row=1, col=column)
