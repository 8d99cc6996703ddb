"""What all figures share, and the panels by layer: a frame of `twell.analysis` in, a figure out.

No figure draws more than a few thousand marks, whatever the run's size: the frames are summaries. Titles, units and n
stand in the page above each figure; inside it stand axis names, direct labels and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twell.app.theme import AMBER, BLUE, GREY, GRID
from twell.app.words import number, whole

CONFIG = {"displaylogo": False, "displayModeBar": False, "scrollZoom": False, "responsive": True}
RATIOS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)  # ticks of a logarithmic axis of ratios
ZERO = 0.5  # where a logarithmic axis shows 0


def finish(
    figure: go.Figure, height: int, left: int = 56, right: int = 16, top: int = 24, bottom: int = 44
) -> go.Figure:
    """The look that all figures share: thin grid, no frame, hover near the pointer."""
    figure.update_layout(
        height=height,
        margin={"l": left, "r": right, "t": top, "b": bottom},
        showlegend=False,
        dragmode=False,
        hovermode="closest",
        plot_bgcolor="rgba(0,0,0,0)",
        paper_bgcolor="rgba(0,0,0,0)",
    )
    figure.update_xaxes(gridcolor=GRID, gridwidth=1, zeroline=False, title_standoff=6, ticks="", fixedrange=True)
    figure.update_yaxes(gridcolor=GRID, gridwidth=1, zeroline=False, title_standoff=6, ticks="", fixedrange=True)
    return figure


def layer_names(layers: pd.Series | np.ndarray | list[int]) -> list[str]:
    """L0, L1, …"""
    return [f"L{int(layer)}" for layer in layers]


def layer_axis(figure: go.Figure, layers: list[int], **where: Any) -> None:
    """Layers down the y axis, the first on top; many layers are named every second or fourth."""
    step = 1 if len(layers) <= 32 else 2 if len(layers) <= 64 else 4
    named = layers[::step]
    figure.update_yaxes(
        tickvals=named, ticktext=layer_names(named), range=[max(layers) + 0.75, min(layers) - 0.95], **where
    )


def spans(low: Sequence[float], high: Sequence[float], rows: Sequence[float]) -> dict[str, list[float | None]]:
    """x and y of a line in each row, from one value to another: one trace for all of them."""
    ends = [(x, y) for a, b, y in zip(low, high, rows, strict=True) for x in (a, b, None)]
    return {"x": [x for x, _ in ends], "y": [y for _, y in ends]}


def whiskers(low: pd.Series, value: pd.Series, high: pd.Series, thickness: float = 1.4, **look: Any) -> dict[str, Any]:
    """The interval of each dot, as plotly's error bars."""
    bars = {"type": "data", "array": high - value, "arrayminus": value - low}
    return {**bars, "thickness": thickness, "width": 0, **look}


def panel_title(name: str, column: int, above: int = 22) -> dict[str, Any]:
    """A note: what a panel shows, so many pixels above its left end."""
    place = {"xref": f"x{column if column > 1 else ''} domain", "yref": "paper", "x": 0, "y": 1, "yshift": above}
    return {**place, "text": name, "xanchor": "left", "showarrow": False, "font": {"size": 12, "color": GREY}}


def log_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Ticks of a logarithmic axis at 1, 3, 10, 30, … between two values, or at powers of ten where those are many."""
    steps = (1, 3) if math.log10(max(high, 1) / max(low, 1e-9)) <= 3 else (1,)
    first, last = math.floor(math.log10(max(low, 1e-9))), math.ceil(math.log10(max(high, 1e-9)))
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    ticks = [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]
    return ticks, [number(tick, 1) for tick in ticks]


def zero_log_axis(figure: go.Figure, high: float, title: str, **where: Any) -> None:
    """A logarithmic x axis over counts, with a place for 0 at its left."""
    ticks, text = log_ticks(1, high)
    figure.update_xaxes(
        type="log",
        title=title,
        tickvals=[ZERO, *ticks],
        ticktext=["0", *text],
        range=[math.log10(ZERO * 0.8), math.log10(max(high, 2) * 1.15)],
        **where,
    )


def small_multiples(
    frame: pd.DataFrame,
    x: str,
    titles: dict[int, str],
    x_title: str,
    y_title: str,
    log: bool = False,
    log_y: bool = False,
) -> go.Figure:
    """A panel a layer: `relative` with its interval `low` to `high` against `x`; rows marked `first` stand apart."""
    layers = sorted(frame["layer"].unique())
    columns = 4 if len(layers) <= 12 else 6
    rows = math.ceil(len(layers) / columns)
    figure = make_subplots(
        rows=rows,
        cols=columns,
        shared_xaxes="all",
        shared_yaxes="all",
        horizontal_spacing=0.02,
        vertical_spacing=min(0.3 / rows, 0.14),
        subplot_titles=[titles[int(layer)] for layer in layers],
    )
    # Traces and lines go in all at once: one by one, plotly looks through those that are there already.
    panels = {layer: str(place + 1) if place else "" for place, layer in enumerate(layers)}
    traces = [trace for layer, n in panels.items() for trace in _panel(frame[frame["layer"] == layer], x, n)]
    figure.add_traces(traces)
    level = {"type": "line", "x0": 0, "x1": 1, "y0": 1, "y1": 1, "line": {"color": GREY, "width": 1, "dash": "dot"}}
    figure.update_layout(shapes=[level | {"xref": f"x{n} domain", "yref": f"y{n}"} for n in panels.values()])
    finish(figure, 60 + (190 if rows <= 3 else 150) * rows, top=26, bottom=50)
    figure.update_annotations(font={"size": 12})
    if log:
        last, apart = float(frame[x].max()), bool(frame["first"].any())
        powers = [10.0**k for k in range(math.ceil(math.log10(last)))]
        figure.update_xaxes(
            type="log",
            tickvals=[ZERO] * apart + powers,
            ticktext=["first"] * apart + [whole(power) for power in powers],
            range=[math.log10(ZERO * 0.7 if apart else 0.85), math.log10(last * 1.2)],
        )
    for n in list(panels.values())[-columns:]:  # the lowest panel of each column
        figure.layout[f"xaxis{n}"].update(title=x_title, title_standoff=6, showticklabels=True)
    low, high = min(float(frame["low"].min()), 0.9), max(float(frame["high"].max()), 1.1)
    if log_y:
        low = max(low, float(frame.loc[frame["relative"] > 0, "relative"].min()) / 2)
        ticks = [tick for tick in RATIOS if low / 1.1 <= tick <= high * 1.1]
        ends = [math.log10(low / 1.1), math.log10(high * 1.1)]
        figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks], range=ends)
    else:
        figure.update_yaxes(range=[max(0.0, low - 0.08 * (high - low)), high + 0.08 * (high - low)])
    figure.update_yaxes(title=y_title, row=(rows + 1) // 2, col=1)
    return figure


def _panel(part: pd.DataFrame, x: str, number: str) -> list[dict[str, Any]]:
    """A line over its interval, the fitted curve where there is one, and a dot at the left for a row marked `first`."""
    part = part.sort_values(x)
    apart = part["first"] if "first" in part else pd.Series(False, index=part.index)
    rest, one = part[~apart], part[apart]
    common = {"type": "scatter", "xaxis": f"x{number}", "yaxis": f"y{number}"}
    traces: list[dict[str, Any]] = [
        common
        | {
            "x": [*rest[x], *rest[x][::-1]],
            "y": [*rest["high"], *rest["low"][::-1]],
            "mode": "lines",
            "line": {"width": 0},
            "fill": "toself",
            "fillcolor": "rgba(47, 126, 216, 0.2)",
            "hoverinfo": "skip",
        },
        common
        | {
            "x": rest[x],
            "y": rest["relative"],
            "mode": "lines",
            "line": {"color": BLUE, "width": 1.6},
            "text": rest["hover"],
            "hovertemplate": "%{text}<extra></extra>",
        },
    ]
    if "fit" in rest and rest["fit"].notna().any():
        dotted = {"color": AMBER, "width": 1.4, "dash": "dot"}
        traces.append(common | {"x": rest[x], "y": rest["fit"], "mode": "lines", "line": dotted, "hoverinfo": "skip"})
    if len(one):
        up, down = one["high"] - one["relative"], one["relative"] - one["low"]
        traces.append(
            common
            | {
                "x": [ZERO],
                "y": one["relative"],
                "mode": "markers",
                "marker": {"color": AMBER, "size": 7},
                "error_y": {"type": "data", "array": up, "arrayminus": down, "thickness": 1.2, "width": 0},
                "text": one["hover"],
                "hovertemplate": "%{text}<extra></extra>",
            }
        )
    return traces
