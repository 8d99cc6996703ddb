"""What all figures share: a frame of `twell.analysis` in, a figure out.

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

from twell.app.ui.formatting import SPACE, number
from twell.app.ui.theme import GRID, WORDS

CONFIG = {"displaylogo": False, "displayModeBar": False, "scrollZoom": False, "responsive": True}
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
        separators=f".{SPACE}",
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
    return {**place, "text": name, "xanchor": "left", "showarrow": False, "font": {"size": 12, "color": WORDS}}


def log_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Ticks of a logarithmic axis at 1, 3, 10, 30, … between two values, at powers of ten where those are many, and
    closer where there would be fewer than two."""
    first, last = math.floor(math.log10(max(low, 1e-9))), math.ceil(math.log10(max(high, 1e-9)))
    ticks: list[float] = []
    for steps in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        every = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        ticks = [tick for tick in every if low * 0.999 <= tick <= high * 1.001]
        if len(ticks) >= (5 if steps == (1,) else 2):
            break
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
