"""Figures of the Neurons pages: densities by layer, one neuron's rank in its layer, and its values."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from twell.app.ui.figures.plot_style import finish, layer_axis, log_ticks
from twell.app.ui.formatting import SPACE, number, percent, whole
from twell.app.ui.theme import AMBER, BLUE, GREY, SCALE

CURVE_POINTS = 600
MIN_HISTOGRAM = 40  # values; fewer are drawn one by one


def density_label(share: float) -> str:
    """Return a density (0 to 1) as a percentage with one significant digit."""
    return f"{number(100 * share, 1)}{SPACE}%"


def density_map(frame: pd.DataFrame) -> go.Figure:
    """Return a heat map of the share of each layer's neurons by density (`density_bins`)."""
    table = frame.pivot(index="layer", columns="low", values="share")
    counts = frame.pivot(index="layer", columns="low", values="neurons")
    highs = frame.drop_duplicates("low").set_index("low")["high"]
    names = ["never" if low == 0 else f"{density_label(low)}–{density_label(highs[low])}" for low in table.columns]
    labels = ["never" if low == 0 else density_label(low) for low in table.columns]
    step = 1 if max(map(len, labels)) <= 8 else 2  # between bins that the axis names, from "never" on
    layers = [int(layer) for layer in table.index]
    labelled = len(layers) <= 20  # with more layers the cells have no room for text
    share = table.to_numpy(float)
    figure = go.Figure(
        go.Heatmap(
            z=share,
            x=list(range(len(names))),
            y=layers,
            colorscale=SCALE,
            zmin=0,
            zmax=float(share.max()) or 1.0,
            xgap=1,
            ygap=1,
            text=[[percent(v) if v else "" for v in row] for row in share] if labelled else None,
            texttemplate="%{text}" if labelled else None,
            textfont={"size": 11},
            customdata=counts.to_numpy(),
            hovertext=[names] * len(layers),
            hovertemplate="layer %{y:.0f}, density %{hovertext}<br>%{customdata:,} neurons<extra></extra>",
            showscale=False,
        )
    )
    finish(figure, 90 + max(20, 30 if labelled else 20) * len(layers))
    layer_axis(figure, layers, showgrid=False)
    figure.update_yaxes(range=[max(layers) + 0.5, min(layers) - 0.5])
    figure.update_xaxes(
        tickvals=list(range(len(labels)))[::step],
        ticktext=labels[::step],
        showgrid=False,
        tickangle=0,
        title="density, lower bound of each bin",
    )
    return figure


def rank_curve(densities: np.ndarray, rank: int, density: float, label: str) -> go.Figure:
    """Return the densities of a layer's neurons by rank, one of them marked; axes are logarithmic.

    Args:
        densities: of all the layer's neurons, highest first. Those that never fired are not drawn.
        rank: of the marked neuron, from 1.
        density: of the marked neuron, 0 to 1.
        label: its name, such as L3/N42.
    """
    alive = densities[densities > 0]
    drawn_ranks = np.unique(np.geomspace(1, max(len(alive), 1), CURVE_POINTS).astype(int))[: len(alive)]
    figure = go.Figure(
        go.Scatter(
            x=drawn_ranks,
            y=alive[drawn_ranks - 1] if len(alive) else [],
            mode="lines",
            line={"color": BLUE, "width": 1.6},
            hovertemplate="rank %{x:,}: density %{y:.3%}<extra></extra>",
        )
    )
    if density > 0:
        figure.add_scatter(
            x=[rank],
            y=[density],
            mode="markers+text",
            marker={"color": AMBER, "size": 9},
            text=[label],
            textposition="top right"
            if rank < len(alive) / 30
            else "bottom left",  # where the falling curve leaves room
            hovertemplate=f"{label}: rank {whole(rank)}, density %{{y:.3%}}<extra></extra>",
            cliponaxis=False,
        )
    finish(figure, 250)
    figure.update_xaxes(type="log", title=f"rank in the layer, of {whole(len(densities))} neurons")
    figure.update_yaxes(type="log", title="density")
    if len(alive):
        ticks, _ = log_ticks(float(alive[-1]), float(alive[0]))
        figure.update_yaxes(tickvals=ticks, ticktext=[density_label(tick) for tick in ticks])
        figure.update_yaxes(range=[math.log10(alive[-1]) - 0.15, math.log10(alive[0]) + 0.3])
        figure.update_xaxes(range=[-0.05, math.log10(len(alive)) + 0.1], dtick=1)
    return figure


def value_distribution(values: np.ndarray, mean: float, largest: float) -> go.Figure:
    """Return a histogram of a neuron's values; a line for each value if there are fewer than MIN_HISTOGRAM.

    Args:
        values: a sample of its values above 0.
        mean: over all its firings; NaN if unknown.
        largest: over all its firings; NaN if unknown.
    """
    figure = go.Figure()
    is_histogram = len(values) >= MIN_HISTOGRAM
    if is_histogram:
        counts, bounds = np.histogram(
            values, bins=min(40, max(12, len(values) // 12)), range=(0.0, float(values.max()))
        )
        figure.add_bar(
            x=(bounds[:-1] + bounds[1:]) / 2,
            y=counts,
            width=np.diff(bounds) * 0.92,
            marker={"color": BLUE, "opacity": 0.75},
            customdata=np.column_stack([bounds[:-1], bounds[1:]]),
            hovertemplate="value %{customdata[0]:.3g} to %{customdata[1]:.3g}: %{y:,} firings<extra></extra>",
        )
    else:
        figure.add_scatter(
            x=values,
            y=np.zeros(len(values)),
            mode="markers",
            marker={"color": BLUE, "size": 22, "symbol": "line-ns-open", "line": {"width": 2}},
            hovertemplate="value %{x:.3g}<extra></extra>",
        )
    finish(figure, 250, top=36)
    for value, name in ((mean, "mean"), (largest, "largest")):
        if math.isfinite(value):
            figure.add_vline(x=value, line={"color": GREY, "width": 1.2, "dash": "dot"})
            figure.add_annotation(
                text=f"{name} {number(value)}",
                x=value,
                yref="paper",
                y=1,
                yshift=12,
                xanchor="center" if name == "mean" else "right",
                showarrow=False,
                font={"size": 11},
            )
    figure.update_xaxes(
        title="value where it fires", range=[0, max(largest, float(np.max(values, initial=0.0)), 1e-9) * 1.04]
    )
    figure.update_yaxes(title="firings" if is_histogram else "", showgrid=is_histogram, showticklabels=is_histogram)
    return figure
