"""Figures of the Neurons pages: densities by layer, one neuron's rank in its layer, and its values."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from twell.analysis.figures.labels import SPACE, number, percent, whole
from twell.analysis.figures.style import AMBER, BLUE, GREY, SCALE, finish, layer_axis, log_ticks, root_color_bar
from twell.analysis.neurons.by_neuron import by_neuron
from twell.analysis.neurons.value_histogram import BEGINS
from twell.workbench.run.store import Run

CURVE_POINTS = 600
MOST_TICKS = 12  # bins from which every second label is left out: on a phone they would lie on one another
MIN_HISTOGRAM = 40  # values; fewer are drawn one by one


def density_bounds(tokens: int) -> list[float]:
    """Return the bounds of bins of densities, 1, 3, 10, … from the lowest that `tokens` tokens can show up to 1."""
    lowest = 1 / max(tokens, 2)
    bounds = [step * 10.0**power for power in range(math.floor(math.log10(lowest)), 0) for step in (1, 3)]
    start = max(index for index, bound in enumerate(bounds) if bound <= lowest)
    return [*bounds[start:], 1.0 + 1e-9]


def density_bins(run: Run) -> pd.DataFrame:
    """Return how many neurons of each layer have which density.

    Columns: layer; low, high (bounds of the density, both 0 for neurons that never fired); neurons; share (of the
    layer's neurons).
    """
    frame = by_neuron(run)
    bounds = density_bounds(int(frame["tokens"].iloc[0]))
    index = np.searchsorted(bounds, frame["density"], side="right")  # 0: never fired
    counts = pd.crosstab(frame["layer"], index).reindex(columns=range(len(bounds)), fill_value=0)
    bins = counts.rename_axis("bin", axis=1).stack().rename("neurons").reset_index()
    edges = [0.0, *bounds]
    bins["low"] = [0.0 if k == 0 else edges[k] for k in bins["bin"]]
    bins["high"] = [0.0 if k == 0 else min(edges[k + 1], 1.0) for k in bins["bin"]]
    bins["share"] = bins["neurons"] / run.widths[bins["layer"]]
    return bins[["layer", "low", "high", "neurons", "share"]]


def ranks(run: Run, layer: int) -> pd.DataFrame:
    """Return the densities of a layer's neurons, highest first. Columns: rank (from 1), density."""
    densities = -np.sort(-by_neuron(run, layer=layer)["density"].to_numpy(float))
    return pd.DataFrame({"rank": np.arange(1, len(densities) + 1), "density": densities})


def density_label(share: float) -> str:
    """Return a density (0 to 1) as a percentage with one significant digit."""
    return f"{number(100 * share, 1)}{SPACE}%"


def density_names(frame: pd.DataFrame) -> dict[float, str]:
    """Return the name of each bin of `density_bins` by its lower bound, in order: dead, 0.1 %–0.3 %."""
    highs = frame.groupby("low")["high"].first()
    return {low: f"{density_label(low)}–{density_label(high)}" if low else "dead" for low, high in highs.items()}


def density_map(frame: pd.DataFrame) -> go.Figure:
    """Return a heat map of the share of each layer's neurons by density (`density_bins`)."""
    table = frame.pivot(index="layer", columns="low", values="share")
    counts = frame.pivot(index="layer", columns="low", values="neurons")
    names = [*density_names(frame).values()]
    labels = ["dead" if low == 0 else density_label(low) for low in table.columns]
    step = 1 if max(map(len, labels)) <= 8 else 2  # between bins that the axis names, from "dead" on
    layers = [int(layer) for layer in table.index]
    labelled = len(layers) <= 20  # with more layers the cells have no room for text
    share = table.to_numpy(float)
    figure = go.Figure(
        go.Heatmap(
            z=np.sqrt(share),  # a few full cells would leave all others blank
            x=list(range(len(names))),
            y=layers,
            colorscale=SCALE,
            zmin=0,
            zmax=float(np.sqrt(share.max())) or 1.0,
            xgap=1,
            ygap=1,
            text=[[percent(v) if v else "" for v in row] for row in share] if labelled else None,
            texttemplate="%{text}" if labelled else None,
            textfont={"size": 11},
            customdata=counts.to_numpy(),
            hovertext=[names] * len(layers),
            hovertemplate="layer %{y:.0f}, density %{hovertext}<br>%{customdata:,} neurons<extra></extra>",
            showscale=not labelled,
            colorbar=None if labelled else root_color_bar(float(share.max())),
        )
    )
    finish(figure, 90 + (30 if labelled else 20) * len(layers))
    layer_axis(figure, layers, showgrid=False)
    figure.update_yaxes(range=[max(layers) + 0.5, min(layers) - 0.5])
    figure.update_xaxes(
        tickvals=list(range(len(labels)))[::step],
        ticktext=labels[::step],
        showgrid=False,
        tickangle=0,
        title="density: share of tokens that fire a neuron, from",
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


def value_bars(frame: pd.DataFrame, mean: float, largest: float) -> go.Figure:
    """Return how many firings each bin of a neuron's values has; the axis is logarithmic, a bar a bin.

    Args:
        frame: the neuron's rows of `neuron_histogram`.
        mean: over all its firings.
        largest: over all its firings.
    """
    place = np.searchsorted(BEGINS, frame["low"])  # the bin's number
    figure = go.Figure(
        go.Bar(
            x=place + 0.5,
            y=frame["fires"],
            width=0.92,
            marker={"color": BLUE, "opacity": 0.75},
            customdata=np.column_stack([frame["low"], frame["high"].clip(upper=max(largest, 0.0)), frame["share"]]),
            hovertemplate="value %{customdata[0]:.3g} to %{customdata[1]:.3g}: %{y:,} firings, "
            "%{customdata[2]:.1%}<extra></extra>",
        )
    )
    finish(figure, 256, top=42)
    mark_values(figure, {"mean": (mean, bin_place(mean)), "largest": (largest, bin_place(largest))})
    first, last = place.min() // 2 * 2, place.max() + 2
    ticks = np.arange(first, last, 2 if last - first < MOST_TICKS else 4)  # a doubling, or two
    labels = [number(2.0 ** (tick // 2 - 9)) if tick else "0" for tick in ticks]
    figure.update_xaxes(title="value where it fires", tickvals=ticks, ticktext=labels, tickangle=0)
    figure.update_yaxes(title="firings")
    return figure


def bin_place(value: float) -> float:
    """Return where a value is on an axis of bin numbers; NaN where it is not finite."""
    if not math.isfinite(value):
        return math.nan
    index = int(np.searchsorted(BEGINS, value, side="right")) - 1
    ends = [*BEGINS[1:], max(2 * BEGINS[-1] / 1.5, value)]
    return index + (value - BEGINS[index]) / (ends[index] - BEGINS[index])


def mark_values(figure: go.Figure, values: dict[str, tuple[float, float]]) -> None:
    """Draw a line at each value, with its name above, each on a line of its own: the values may be near one another.

    values: by name the value, and its place on the axis
    """
    for row, (name, (value, place)) in enumerate(values.items()):
        if math.isfinite(value):
            figure.add_vline(x=place, line={"color": GREY, "width": 1.2, "dash": "dot"})
            figure.add_annotation(
                text=f"{name} {number(value)}",
                x=place,
                yref="paper",
                y=1,
                yshift=10 + 14 * row,
                xanchor="right",
                showarrow=False,
                font={"size": 11},
            )


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
    finish(figure, 256, top=42)
    mark_values(figure, {"mean": (mean, mean), "largest": (largest, largest)})
    figure.update_xaxes(
        title="value where it fires", range=[0, max(largest, float(np.max(values, initial=0.0)), 1e-9) * 1.04]
    )
    figure.update_yaxes(title="firings" if is_histogram else "", showgrid=is_histogram, showticklabels=is_histogram)
    return figure
