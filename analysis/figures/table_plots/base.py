"""What figures of tables have in common: the empty figure, dots with intervals, and the dashboard's style."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from twell.workbench.errors import Missing

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

INK, SECOND = "#2f5d8a", "#c06a2d"
# Red, green and blue of layers by depth; others lie between. Found by search: of eight layers the nearest two are
# 1.4 to 2.3 times as far apart, by color vision, as between blue and amber, with a contrast of 3 on either page.
DEPTHS = ((55, 94, 255), (107, 84, 195), (151, 68, 143), (193, 123, 140), (224, 0, 0))
OTHER_COLORS = ("#4a9c72", "#a06cc0", "#c75c6a", "#3f9aa8", "#8a7a3b")  # of a dressed figure, after the page's own
BARS = "rgba(47, 126, 216, 0.36)"
HEIGHT, LEGEND = 360, 44  # pixels of a dressed figure, and for the names above it
FEW = 16  # layers, of which each has its number on an axis
BESIDE = 0.16  # layers between dots of one layer


def empty(x: str, y: str, **layout: object) -> Figure:
    """Return an empty figure with these axis titles; layout: further entries of plotly's layout."""
    from plotly.graph_objects import Figure

    plain = {"template": "plotly_white", "height": 380, "margin": {"t": 30, "r": 20, "b": 50, "l": 60}}
    return Figure(layout={**plain, "xaxis_title": x, "yaxis_title": y, **layout})


def layer_axis(table: pd.DataFrame, axis: str = "x") -> dict[str, object]:
    """Return plotly's layout of an axis of layers: each of few is numbered, which would have halves numbered too; of
    one alone nothing beside it is, as there are no layers -1 and 1. axis: x or y"""
    layers = table["layer"][table["layer"] >= 0]
    layout: dict[str, object] = {f"{axis}axis_dtick": 1 if layers.max() < FEW else None}
    if layers.nunique() == 1:
        layout[f"{axis}axis_range"] = [int(layers.max()) - 0.5, int(layers.max()) + 0.5]
    return layout


def log_across(figure: Figure, values: pd.Series) -> None:
    """Make the x axis one of `log_scale` of these values."""
    from twell.analysis.figures.style import log_scale  # which loads plotly

    figure.update_xaxes(**log_scale(values))


def by_depth(table: pd.DataFrame) -> Iterator[tuple[int, pd.DataFrame, str]]:
    """Yield each layer with its rows and its color, from blue to red: no two layers share one, however many there are,
    and up to eight differ to every kind of color vision."""
    stops = np.linspace(0, 1, len(DEPTHS))
    layers = list(table.groupby("layer"))
    for number, (layer, rows) in enumerate(layers):
        depth = number / max(len(layers) - 1, 1)
        mixed = (round(np.interp(depth, stops, part)) for part in zip(*DEPTHS, strict=True))
        yield int(layer), rows, "rgb({}, {}, {})".format(*mixed)


def varied(values: pd.Series) -> None:
    """Raise Missing where no correlation has a value: axes alone would not say why."""
    if values.isna().all():
        raise Missing("What they correlate does not vary in this run.")


def add_ratios(figure: Figure, rows: pd.DataFrame, low: str, high: str, of: str, names: dict[str, str]) -> None:
    """Add a dot a layer at column `ratio` for each value of a column that has any, side by side, with their intervals.

    Args:
        figure: the figure.
        rows: the table.
        low, high: the columns of the interval.
        of: the column that tells the dots of a layer apart.
        names: its values in words.
    """
    groups = [group for group in rows[rows["layer"] >= 0].groupby(of) if group[1]["ratio"].notna().any()]
    for index, (value, part) in enumerate(groups):
        reach = {"array": part[high] - part["ratio"], "arrayminus": part["ratio"] - part[low]}
        beside = part["layer"] + BESIDE * (index - (len(groups) - 1) / 2)
        figure.add_scatter(
            x=beside,
            y=part["ratio"],
            error_y=reach,
            name=names.get(str(value), str(value)),
            mode="markers",
            customdata=part["layer"],
            hovertemplate="layer %{customdata}: %{y:.3g}",
        )


def dressed(figure: Figure) -> Figure:
    """Return a figure of a table in the dashboard's style: no background, its colors, names above it."""
    from twell.analysis.figures.style import AMBER, BLUE, DOTTED, GREY, LEGEND_ABOVE, finish  # which load plotly

    left, height = figure.layout.margin.l or 56, figure.layout.height or HEIGHT
    named = len([trace for trace in figure.data if trace.name and trace.showlegend is not False]) > 1
    figure.layout.template = None
    finish(figure, min(height, 520), left=max(int(left), 72), top=LEGEND if named else 24)
    figure.update_layout(showlegend=named, legend=LEGEND_ABOVE)
    figure.update_yaxes(title_standoff=22)  # beside the numbers, not on them
    colors = cycle((BLUE, AMBER, GREY, *OTHER_COLORS))
    for trace in figure.data:
        if trace.type == "heatmap":
            trace.update(
                colorscale=[[0.0, AMBER], [0.5, "rgba(139, 149, 161, 0.06)"], [1.0, BLUE]],
                colorbar={"thickness": 10, "outlinewidth": 0},
            )
            figure.update_xaxes(showgrid=False)
            figure.update_yaxes(showgrid=False, autorange="reversed")
            continue
        color = trace.line.color if trace.type == "scatter" and trace.line.color else next(colors)
        trace.update(marker_color=BARS if trace.type == "bar" else color)
        if trace.type == "scatter":
            trace.update(line_color=color)
            for axis in ("error_x", "error_y"):
                if trace[axis].array is not None:
                    trace.update({axis: {"color": color, "width": 0, "thickness": 1.4}})
    figure.update_shapes(line=DOTTED)
    return figure
