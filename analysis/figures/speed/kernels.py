"""Figures of the Kernels page: where a forward pass spends its time, and how many tokens overflow a tile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from twell.analysis.figures.labels import SPACE, percent, whole
from twell.analysis.figures.speed.timings import time_unit
from twell.analysis.figures.style import BLUE, GREY, SCALE, finish, layer_axis, root_color_bar

MIN_LAYERS = 4  # to fit a line through
MIN_LABEL_SHARE = 0.07  # of the pass: a narrower bar has no room for its name
SHADES = {"ffn": (BLUE, 0.95), "attention": (GREY, 0.6), "rest": (GREY, 0.3)}


def break_even(frame: pd.DataFrame) -> float | None:
    """Return the mean nnz, in neurons, at which sparse takes as long as dense, by a line through the layers.

    The line (Theil-Sen) is fitted to sparse time / dense time against nnz. None if there are fewer than MIN_LAYERS
    layers, if all have the same nnz, if time does not grow with nnz, or if sparse is slower even without any nnz.

    Args:
        frame: the rows of `analysis.speedup`.
    """
    nnz, ratio = frame["nnz_mean"].to_numpy(float), (frame["sparse_us"] / frame["dense_us"]).to_numpy(float)
    if len(frame) < MIN_LAYERS or np.ptp(nnz) == 0:
        return None
    i, j = np.triu_indices(len(nnz), 1)
    differ = nnz[i] != nnz[j]
    slope = float(np.median((ratio[i] - ratio[j])[differ] / (nnz[i] - nnz[j])[differ]))
    intercept = float(np.median(ratio - slope * nnz))
    if slope <= 0 or intercept >= 1:
        return None
    return (1 - intercept) / slope


def time_split(frame: pd.DataFrame) -> go.Figure:
    """Return a bar each for dense and sparse, split into FFN, attention and the rest (`analysis.model_time`), which say
    their share of the bar."""
    rows = frame.set_index("part")[["dense_us", "sparse_us"]].clip(lower=0)
    drawn = rows.drop("whole").sum()  # more than the whole where parts, which are timed apart, took longer than in it
    unit, scale = time_unit(float(drawn.max()))
    figure = go.Figure()
    for component, (color, opacity) in SHADES.items():
        if component not in rows.index:
            continue
        name = "FFN" if component == "ffn" else component
        times, shares = rows.loc[component] * scale, rows.loc[component] / drawn
        figure.add_bar(
            y=["dense", "sparse"],
            x=times,
            orientation="h",
            marker={"color": color, "opacity": opacity},
            text=[f"{name} {percent(share)}" if share >= MIN_LABEL_SHARE else "" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"size": 12},
            customdata=[percent(share) for share in shares],
            hovertemplate=f"{name}: %{{x:,.4g}} {unit}, %{{customdata}} of the pass<extra></extra>",
            width=0.6,
        )
    finish(figure, 170, left=56)
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title=f"time of a forward pass, {unit}")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def of_tile(frame: pd.DataFrame, tile: int) -> pd.DataFrame:
    """Return the rows of `analysis.tile_audit` about tiles of `tile` neurons."""
    return frame[frame["tile"] == tile]


def audit_map(frame: pd.DataFrame) -> go.Figure:
    """Return a heat map of the share of tokens that overflow a tile, by layer and compression.

    Args:
        frame: the rows of `analysis.tile_audit` about one tile size.
    """
    values = frame.pivot(index="layer", columns="compression", values="rows_over_share")
    labels = None
    if len(values) <= 20:  # with more layers the cells have no room for text
        labels = values.map(lambda share: f"<{SPACE}0.01{SPACE}%" if 0 < share < 1e-4 else percent(share))
    hover = "layer %{y:.0f}: %{customdata:.3g} % of tokens<extra></extra>"
    shades = root_color_bar(1.0) if labels is None else None
    return compression_map(frame, np.sqrt(values), (0, 1), labels, hover, 100 * values, shades)


def compression_map(
    frame: pd.DataFrame,
    shades: pd.DataFrame,
    limits: tuple[float, float],
    labels: pd.DataFrame | None,
    hover: str,
    hover_values: pd.DataFrame | None = None,
    color_bar: dict[str, Any] | None = None,
) -> go.Figure:
    """Return a heat map with a row a layer and a column a compression.

    Args:
        frame: a table with the columns `compression` and `slots`, which name the columns of the map.
        shades: the values that are drawn as shades, layers × compressions.
        limits: the values of the lightest and the darkest shade.
        labels: the text of each cell; None to draw none.
        hover: plotly's template of the tooltip.
        hover_values: `customdata` of that template.
        color_bar: tells what the shades are, where the cells have no text.
    """
    layers = [int(layer) for layer in shades.index]
    columns = list(range(len(shades.columns)))
    figure = go.Figure(
        go.Heatmap(
            z=shades.to_numpy(float),
            x=columns,
            y=layers,
            colorscale=SCALE,
            zmin=limits[0],
            zmax=limits[1],
            xgap=1,
            ygap=1,
            text=None if labels is None else labels.to_numpy(),
            texttemplate=None if labels is None else "%{text}",
            textfont={"size": 11},
            customdata=None if hover_values is None else hover_values.to_numpy(float),
            hovertemplate=hover,
            showscale=color_bar is not None,
            colorbar=color_bar,
        )
    )
    slots = frame.drop_duplicates("compression").set_index("compression")["slots"]
    finish(figure, 106 + (20 if labels is None else 28) * len(layers), bottom=60)
    layer_axis(figure, layers, showgrid=False)
    figure.update_yaxes(range=[max(layers) + 0.5, min(layers) - 0.5])
    names = [f"{compression}<br>{whole(slots[compression])} slots" for compression in shades.columns]
    figure.update_xaxes(tickvals=columns, ticktext=names, showgrid=False, title="compression", title_standoff=22)
    return figure
