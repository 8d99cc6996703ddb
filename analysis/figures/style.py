"""The style that all figures share: a frame of `twell.analysis` in, a figure out.

No figure draws more than a few thousand marks, whatever the run's size: the frames are summaries. Titles, units and n
stand in the page above each figure; inside it stand axis names, direct labels and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from twell.analysis.figures.labels import SPACE, number, percent

BLUE, GREY, AMBER = "#2f7ed8", "#8b95a1", "#c9821f"
WORDS = "#717c88"  # of names inside figures, to be read on both backgrounds
FONT = '"Source Sans", sans-serif'  # the pages' own
GRID = "rgba(139, 149, 161, 0.22)"
SCALE = [[0.0, "rgba(47, 126, 216, 0.05)"], [0.5, "rgba(47, 126, 216, 0.42)"], [1.0, "rgba(47, 126, 216, 0.85)"]]
CONFIG = {"displaylogo": False, "displayModeBar": False, "scrollZoom": False, "responsive": True}
LEGEND_ABOVE = {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"}  # in sight where a wide figure scrolls
ZERO = 0.5  # where a logarithmic axis shows 0
DOTTED = {"color": GREY, "width": 1, "dash": "dot"}  # the line of the value that others are read against


def finish(
    figure: go.Figure, height: int, left: int = 56, right: int = 16, top: int = 24, bottom: int = 44
) -> go.Figure:
    """Give a figure its height and margins, in pixels, and the style that all figures share; return it.

    Axes do not widen the margins, and names along x are not turned: plotly would draw each figure twice, or measure
    each name. No template: Streamlit's copies of one would not count as the same, and be drawn again.
    """
    figure.layout.template = None
    figure.update_layout(
        height=height,
        margin={"l": left, "r": right, "t": top, "b": bottom, "pad": 7.5},
        font={"family": FONT, "size": 11.25, "color": WORDS},
        showlegend=False,
        dragmode=False,
        hovermode="closest",
        plot_bgcolor="rgba(0,0,0,0)",
        paper_bgcolor="rgba(0,0,0,0)",
        separators=f".{SPACE}",
    )
    look = {"gridcolor": GRID, "gridwidth": 1, "zeroline": False, "title_standoff": 6, "ticks": ""}
    look |= {"fixedrange": True, "automargin": False, "title_font_size": 13}
    figure.update_xaxes(**look, tickangle=0)
    for axis in figure.select_xaxes():
        axis.showgrid = bool(axis.showgrid)
    figure.update_yaxes(**look, ticklabeloverflow="allow")  # the margin has room: nothing to measure a name for
    return figure


def layer_names(layers: pd.Series | np.ndarray | list[int]) -> list[str]:
    """Return the names of layers: L0, L1, …"""
    return [f"L{int(layer)}" for layer in layers]


def layer_axis(figure: go.Figure, layers: list[int], evenly: bool = False, **where: Any) -> None:
    """Name layers down the y axis, the first on top: each one, or every second or fourth if there are many.

    Args:
        figure: the figure, whose y values are layer numbers; with `evenly` their places in `layers`, from 0 on.
        layers: the layers, in order.
        evenly: a line each, also where layers between them are missing.
        where: `row` and `col` of the panel, if the figure has several.
    """
    step = 1 if len(layers) <= 32 else 2 if len(layers) <= 64 else 4
    lines = list(range(len(layers))) if evenly else layers
    limits = [max(lines) + 0.75, min(lines) - 0.95]
    figure.update_yaxes(tickvals=lines[::step], ticktext=layer_names(layers[::step]), range=limits, **where)


def finish_layers(figure: go.Figure, layers: Iterable[int], high: bool = False, **margins: int) -> None:
    """Finish a figure with a row for each of some layers: height, style and names of rows.

    Args:
        figure: the figure, whose y values are layer numbers.
        layers: the layers, in order.
        high: rows with room for two marks or for a name beside them.
        margins: as `finish` takes them, in pixels.
    """
    rows = [int(layer) for layer in layers]
    least, most, whole, fewest = (18, 34, 800, 4) if high else (12, 26, 560, 1)
    finish(figure, 90 + max(least, min(most, whole // max(len(rows), 1))) * max(len(rows), fewest), **margins)
    layer_axis(figure, rows)


def layers_across(figure: go.Figure, layers: list[int]) -> None:
    """Name layers along the x axis, whose values are layer numbers: at most 24 of them."""
    named = layers[:: max(1, math.ceil(len(layers) / 24))]
    figure.update_xaxes(tickvals=named, ticktext=layer_names(named), showgrid=False)


def spans(low: Sequence[float], high: Sequence[float], rows: Sequence[float], **look: Any) -> go.Scatter:
    """Return one trace that draws a horizontal line from `low` to `high` at each of `rows`; look: its line, opacity."""
    ends = [(x, y) for a, b, y in zip(low, high, rows, strict=True) for x in (a, b, None)]
    return go.Scatter(x=[x for x, _ in ends], y=[y for _, y in ends], mode="lines", hoverinfo="skip", **look)


def whiskers(low: pd.Series, value: pd.Series, high: pd.Series, thickness: float = 1.4, **look: Any) -> dict[str, Any]:
    """Return plotly's error bars from `low` to `high` around each value; `look` holds further settings of them."""
    bars = {"type": "data", "array": high - value, "arrayminus": value - low}
    return {**bars, "thickness": thickness, "width": 0, **look}


def dots(x: pd.Series, y: Sequence[float], low: pd.Series, high: pd.Series, size: int = 8, **text: Any) -> go.Scatter:
    """Return a trace with a blue dot a row and a line from `low` to `high` through it; text: what a dot says."""
    look: dict[str, Any] = {"mode": "markers", "marker": {"color": BLUE, "size": size}}
    return go.Scatter(x=x, y=y, error_x=whiskers(low, x, high), **look, **text)


def panel_title(name: str, column: int, above: int = 22) -> dict[str, Any]:
    """Return an annotation with a panel's title, `above` pixels above its left end."""
    anchor = {"xref": f"x{column if column > 1 else ''} domain", "yref": "paper", "x": 0, "y": 1, "yshift": above}
    return {**anchor, "text": name, "xanchor": "left", "showarrow": False, "font": {"size": 12, "color": WORDS}}


def color_bar(values: Sequence[float], texts: Sequence[str], right: float = 1.0) -> dict[str, Any]:
    """Return the color bar of a heat map without texts in its cells, above the panel that ends at `right`.

    Args:
        values: where its ticks stand, as the map's z has them.
        texts: what they say.
        right: the end of the panel, as a share of the figure's width.
    """
    return {
        "orientation": "h",
        "tickvals": list(values),
        "ticktext": list(texts),
        "ticklabelposition": "inside",
        "thickness": 12,
        "outlinewidth": 0,
        "xpad": 0,
        "lenmode": "pixels",
        "len": 180,  # of a phone's figure a share would be so short that plotly turns the ticks
        "x": right,
        "xanchor": "right",
        "y": 1,
        "yanchor": "bottom",
    }


def root_color_bar(high: float) -> dict[str, Any]:
    """Return the color bar of a map whose shades go by the square root of a share, up to `high`."""
    shares = [share for share in (0.01, 0.1, 0.3, 0.6) if share < 0.9 * high] or [high / 2]
    return color_bar([math.sqrt(share) for share in shares], [percent(share) for share in shares])


def log_ticks(low: float, high: float, least: int = 2) -> tuple[list[float], list[str]]:
    """Return ticks, and their texts, of a logarithmic axis between two values: 1, 3, 10, 30, …; powers of ten only if
    those are many; closer ones if there would be fewer than `least`: for values of one size 100, 120, 140, …"""
    first, last = math.floor(math.log10(max(low, 1e-9))), math.ceil(math.log10(max(high, 1e-9)))

    def within(candidates: Iterable[float]) -> list[float]:
        return [tick for tick in candidates if low * 0.999 <= tick <= high * 1.001]

    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5)):
        ticks = within(step * 10.0**power for power in range(first, last + 1) for step in steps)
        if len(ticks) >= (5 if steps == (1,) else least):
            break
    for parts in (1, 5, 10, 20, 50) if len(ticks) < least else ():
        step = 10.0 ** math.floor(math.log10(max(high, 1e-9))) / parts
        ticks = within(step * n for n in range(1, 10 * parts + 1))
        if len(ticks) >= least:
            break
    return ticks, [number(tick, 1 if math.isclose(tick, float(f"{tick:.0e}")) else 2) for tick in ticks]


def log_scale(values: pd.Series) -> dict[str, Any]:
    """Return the settings of a logarithmic axis of some values, those above 0, with ticks in full: between powers of
    ten, plotly's own say 2 for 20 and for 200."""
    drawn = values[values > 0]
    ticks, texts = log_ticks(float(drawn.min()), float(drawn.max()), least=3) if len(drawn) else ([], [])
    return {"type": "log", "tickvals": ticks, "ticktext": texts}


def log_axis(figure: go.Figure, low: float, high: float, title: str) -> None:
    """Make the x axes logarithmic from `low` to `high`, both above 0, with `log_ticks`."""
    ticks, labels = log_ticks(low, high)
    limits = [math.log10(low), math.log10(high)]
    figure.update_xaxes(type="log", title=title, tickvals=ticks, ticktext=labels, range=limits)


def zero_log_axis(figure: go.Figure, high: float, title: str, **where: Any) -> None:
    """Make an x axis of counts logarithmic from 1 to `high`, with room for 0 (drawn at ZERO) at its left."""
    ticks, text = log_ticks(1, high)
    figure.update_xaxes(
        type="log",
        title=title,
        tickvals=[ZERO, *ticks],
        ticktext=["0", *text],
        range=[math.log10(ZERO * 0.8), math.log10(max(high, 2) * 1.15)],
        **where,
    )
