"""The figures of neurons: densities by layer, where one neuron stands in its layer, and how its values spread."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from twell.app.ui.figures.plot_style import finish, layer_axis, log_ticks
from twell.app.ui.formatting import SPACE, number, percent, whole
from twell.app.ui.theme import AMBER, BLUE, GREY, SCALE

CURVE = 600  # points of a curve over neurons
ENOUGH = 40  # values that make a histogram; fewer are drawn one by one


def fine(share: float) -> str:
    """A bound of densities as a percentage, to one digit."""
    return f"{number(100 * share, 1)}{SPACE}%"


def density_map(frame: pd.DataFrame) -> go.Figure:
    """Share of each layer's neurons by density (density_bins)."""
    table = frame.pivot(index="layer", columns="low", values="share")
    counts = frame.pivot(index="layer", columns="low", values="neurons")
    highs = frame.drop_duplicates("low").set_index("low")["high"]
    names = ["never" if low == 0 else f"{fine(low)}–{fine(highs[low])}" for low in table.columns]
    labels = ["never" if low == 0 else fine(low) for low in table.columns]
    every = 1 if max(map(len, labels)) <= 8 else 2  # named; the first is "never"
    layers = [int(layer) for layer in table.index]
    few = len(layers) <= 20
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
            text=[[percent(v) if v else "" for v in row] for row in share] if few else None,
            texttemplate="%{text}" if few else None,
            textfont={"size": 11},
            customdata=counts.to_numpy(),
            hovertext=[names] * len(layers),
            hovertemplate="layer %{y:.0f}, density %{hovertext}<br>%{customdata:,} neurons<extra></extra>",
            showscale=False,
        )
    )
    finish(figure, 90 + max(20, 30 if few else 20) * len(layers))
    layer_axis(figure, layers, showgrid=False)
    figure.update_yaxes(range=[max(layers) + 0.5, min(layers) - 0.5])
    figure.update_xaxes(
        tickvals=list(range(len(labels)))[::every],
        ticktext=labels[::every],
        showgrid=False,
        tickangle=0,
        title="density of the neuron, from",
    )
    return figure


def rank_curve(densities: np.ndarray, rank: int, density: float, label: str) -> go.Figure:
    """The densities of a layer's neurons, busiest first, and where one of them stands. Those that never fired are not
    on the logarithmic axis."""
    alive = densities[densities > 0]
    places = np.unique(np.geomspace(1, max(len(alive), 1), CURVE).astype(int))[: len(alive)]
    figure = go.Figure(
        go.Scatter(
            x=places,
            y=alive[places - 1] if len(alive) else [],
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
            textposition="top right" if rank < len(alive) / 30 else "bottom left",  # under the falling curve
            hovertemplate=f"{label}: rank {whole(rank)}, density %{{y:.3%}}<extra></extra>",
            cliponaxis=False,
        )
    finish(figure, 250)
    figure.update_xaxes(type="log", title=f"rank in the layer, of {whole(len(densities))} neurons")
    figure.update_yaxes(type="log", title="density")
    if len(alive):
        ticks, _ = log_ticks(float(alive[-1]), float(alive[0]))
        figure.update_yaxes(tickvals=ticks, ticktext=[fine(tick) for tick in ticks])
        figure.update_yaxes(range=[math.log10(alive[-1]) - 0.15, math.log10(alive[0]) + 0.3])
        figure.update_xaxes(range=[-0.05, math.log10(len(alive)) + 0.1], dtick=1)
    return figure


def value_spread(values: np.ndarray, mean: float, most: float) -> go.Figure:
    """A histogram of a neuron's values where there are enough, else a stroke for each; and the mean and the greatest of
    all its firings, which the sums know."""
    figure = go.Figure()
    if len(values) >= ENOUGH:
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
    for value, name in ((mean, "mean"), (most, "largest")):
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
        title="value where it fires", range=[0, max(most, float(np.max(values, initial=0.0)), 1e-9) * 1.04]
    )
    few = len(values) < ENOUGH
    figure.update_yaxes(title="" if few else "firings", showgrid=not few, showticklabels=not few)
    return figure
