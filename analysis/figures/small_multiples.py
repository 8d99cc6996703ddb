"""Small multiples: a panel a layer, side by side, on scales that all of them share.

The panels lie in one coordinate system, each shifted to its place, and so do their grid and their names. A browser and
plotly's Python side set up every axis that a figure has: 28 panels with axes of their own took the server 0.7 s and a
slow laptop's browser two, and here both take a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from twell.analysis.figures.labels import whole
from twell.analysis.figures.style import AMBER, BLUE, DOTTED, GRID, WORDS, ZERO, finish

RATIOS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50)  # ticks of a logarithmic axis of ratios
BESIDE, BETWEEN = 0.09, 30  # between panels: as a share of a panel's width; in pixels of height
Ticks = dict[float, str]


@dataclass(frozen=True)
class AxisScale:
    """Values from `low` to `high` as 0 to 1, linear or logarithmic, and those that are named."""

    low: float
    high: float
    log: bool
    ticks: Ticks

    def to_unit(self, values: Any) -> np.ndarray:
        """Return the share of the way from `low` to `high` at which each value lies, cut to 0 to 1."""
        inside = np.clip(np.asarray(values, float), self.low, self.high)
        if self.log:
            return np.log(inside / self.low) / math.log(self.high / self.low)
        return (inside - self.low) / (self.high - self.low)


def small_multiples(
    frame: pd.DataFrame,
    x: str,
    titles: dict[int, str],
    x_title: str,
    y_title: str,
    log: bool = False,
    log_y: bool = False,
) -> go.Figure:
    """Return a figure with one panel a layer, all on the same scales.

    Args:
        frame: a row a layer and bin. Columns: layer; the one named by `x`; relative, low, high (the line and its 95 %
            interval); hover (the text under the pointer); if there, first (rows drawn as dots apart from the line)
            and fit (a dotted curve).
        x: the column along the x axis.
        titles: the title of each panel, by layer.
        x_title, y_title: the names of the axes, with units.
        log, log_y: whether the x axis and the y axis are logarithmic.
    """
    layers = sorted(int(layer) for layer in frame["layer"].unique())
    columns = 4 if len(layers) <= 12 else 6
    rows = math.ceil(len(layers) / columns)
    each = 190 if rows <= 3 else 150  # pixels of height
    down = each / (each - BETWEEN)  # from panel to panel, in heights of one
    corners = {layer: ((1 + BESIDE) * (n % columns), -down * (n // columns)) for n, layer in enumerate(layers)}
    frame = frame.sort_values(["layer", x])
    across, up = _x_scale(frame, x, log), _y_scale(frame, log_y)
    left = frame["layer"].map({layer: corner[0] for layer, corner in corners.items()}).to_numpy()
    foot = frame["layer"].map({layer: corner[1] for layer, corner in corners.items()}).to_numpy()
    apart = frame["first"].to_numpy(bool) if "first" in frame else np.zeros(len(frame), bool)
    points = pd.DataFrame({"layer": frame["layer"], "x": left + across.to_unit(np.where(apart, ZERO, frame[x]))})
    for name in ("relative", "low", "high", "fit"):
        if name in frame:
            points[name] = foot + up.to_unit(frame[name])
    points["hover"] = frame["hover"]
    figure = go.Figure([*_frames(corners, across, up), *_curves(points[~apart]), *_firsts(points[apart])])
    figure.add_traces(_names(corners, titles, across, up, columns))
    finish(figure, 66 + each * rows, top=26, bottom=40)
    figure.update_xaxes(visible=False, range=[0, (1 + BESIDE) * min(columns, len(layers)) - BESIDE])
    figure.update_yaxes(visible=False, range=[-down * (rows - 1), 1])
    style = {"xref": "paper", "yref": "paper", "showarrow": False, "font": {"size": 12}}
    x_note = {**style, "text": x_title, "x": 0.5, "y": 0, "yshift": -22, "yanchor": "top"}
    y_note = {**style, "text": y_title, "x": 0, "y": 0.5, "xshift": -34, "xanchor": "right", "textangle": -90}
    figure.update_layout(annotations=[x_note, y_note])
    return figure


def _x_scale(frame: pd.DataFrame, x: str, log: bool) -> AxisScale:
    """Return the scale of x, from the least to the greatest value; a logarithmic one starts at 1, with room for the
    first position at its left."""
    high = float(frame[x].max())
    if not log:
        low = float(frame[x].min())
        high = high if high > low else low + 1  # of one bin, in which a short text has all of its losses
        return AxisScale(low, high, False, _steps(low, high))
    powers = {10.0**k: whole(10.0**k) for k in range(math.ceil(math.log10(max(high, 2))))}
    if not frame["first"].any():
        return AxisScale(0.85, high * 1.2, True, powers)
    return AxisScale(ZERO * 0.7, high * 1.2, True, {ZERO: "0"} | powers)


def _y_scale(frame: pd.DataFrame, log: bool) -> AxisScale:
    """Return the scale of y, which covers all intervals, all values without an interval, and 1."""
    low = min(float(frame["low"].fillna(frame["relative"]).min()), 0.9)
    high = max(float(frame["high"].fillna(frame["relative"]).max()), 1.1)
    if log:
        low = max(low, float(frame.loc[frame["relative"] > 0, "relative"].min()) / 2)
        low, high = low / 1.1, high * 1.1
        ratios = {ratio: f"{ratio:g}" for ratio in RATIOS if low <= ratio <= high}
        named = ratios if len(ratios) > 1 else _steps(low, high)  # a lone 1 gives no scale
        return AxisScale(low, high, True, named)
    margin = 0.08 * (high - low)
    return AxisScale(max(0.0, low - margin), high + margin, False, _steps(low, high))


def _steps(low: float, high: float) -> Ticks:
    """Return two to six round ticks between two values."""
    power = 10.0 ** math.floor(math.log10(max(high - low, 1e-9)))
    step = next(s * power for s in (0.2, 0.5, 1.0, 2.0) if (high - low) / (s * power) <= 5.0)
    return {k * step: f"{k * step:g}" for k in range(math.ceil(low / step), math.floor(high / step) + 1)}


def _lines(pieces: Iterable[tuple[Sequence[float], Sequence[float]]], **look: Any) -> dict[str, Any]:
    """Return one trace that draws several separate lines, each given as (x, y).

    In arrays of 4 bytes a number, finer than a pixel: as lists of digits a page of 28 panels sends four times as much.
    """
    drawn = [*pieces]
    xs, ys = (
        np.concatenate([np.append(np.asarray(line[axis], np.float32), np.float32("nan")) for line in drawn])
        if drawn
        else np.empty(0, np.float32)
        for axis in (0, 1)
    )
    return {"type": "scatter", "x": xs, "y": ys, "mode": "lines", "hoverinfo": "skip", **look}


def _frames(corners: dict[int, tuple[float, float]], across: AxisScale, up: AxisScale) -> list[dict[str, Any]]:
    """Return the traces of each panel's grid and of the line at its layer's mean."""
    xs, ys = across.to_unit(list(across.ticks)), up.to_unit(list(up.ticks))
    grid = [((x + tick, x + tick), (y, y + 1)) for x, y in corners.values() for tick in xs]
    grid += [((x, x + 1), (y + tick, y + tick)) for x, y in corners.values() for tick in ys]
    one = float(up.to_unit(1.0))
    level = [((x, x + 1), (y + one, y + one)) for x, y in corners.values()]
    return [_lines(grid, line={"color": GRID, "width": 1}), _lines(level, line=DOTTED)]


def _curves(points: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the traces of each panel's line, of the interval under it, and of the fitted curve if there is one."""
    by_layer = [rows for _, rows in points.groupby("layer")]
    bands = [
        ([*p["x"], *p["x"][::-1]], [*p["high"], *p["low"][::-1]]) for rows in by_layer for p in _with_interval(rows)
    ]
    fill = {"line": {"width": 0}, "fill": "toself", "fillcolor": "rgba(47, 126, 216, 0.2)", "hoveron": "points"}
    line = _lines(((p["x"], p["relative"]) for p in by_layer), line={"color": BLUE, "width": 1.6})
    line |= {"text": [hover for p in by_layer for hover in (*p["hover"], None)], "hoverinfo": "text"}
    traces = [_lines(bands, **fill), line]
    if "fit" in points and points["fit"].notna().any():
        dashed = {"color": WORDS, "width": 1.6, "dash": "dash"}
        traces.append(_lines(((p["x"], p["fit"]) for p in by_layer if p["fit"].notna().all()), line=dashed))
    return traces


def _with_interval(points: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the stretches of a panel's points that have an interval: a place that one document tells of has none."""
    known = points[["low", "high"]].notna().all(axis=1)
    return [rows for _, rows in points[known].groupby((known != known.shift()).cumsum()[known])]


def _firsts(points: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the traces of each panel's first position: a dot with its interval."""
    if points.empty:
        return []
    whiskers = [((r.x, r.x), (r.low, r.high)) for r in points.itertuples()]
    dots = {"mode": "markers", "marker": {"color": AMBER, "size": 7}, "hoverinfo": "text", "text": points["hover"]}
    return [
        _lines(whiskers, line={"color": AMBER, "width": 1.2}),
        {"type": "scatter", "x": points["x"], "y": points["relative"], **dots},
    ]


def _names(
    corners: dict[int, tuple[float, float]], titles: dict[int, str], across: AxisScale, up: AxisScale, columns: int
) -> list[dict[str, Any]]:
    """Return annotations: the panels' titles, ticks of y beside each row's first panel, and of x under each column's
    last one."""
    positions = list(corners.values())
    x_ticks = [
        (x + float(across.to_unit(v)), y, name) for x, y in positions[-columns:] for v, name in across.ticks.items()
    ]
    y_ticks = [
        (x, y + float(up.to_unit(v)), f"{name} ") for x, y in positions[::columns] for v, name in up.ticks.items()
    ]
    panel_titles = [(x, y + 1, titles[layer]) for layer, (x, y) in corners.items()]
    notes = []
    for name, texts, size, position in (
        ("titles", panel_titles, 12, "top right"),
        ("x ticks", x_ticks, 11, "bottom center"),
        ("y ticks", y_ticks, 11, "middle left"),
    ):
        x, y, text = zip(*texts, strict=True)
        notes.append(
            {
                "type": "scatter",
                "name": name,
                "x": x,
                "y": y,
                "text": text,
                "mode": "text",
                "textposition": position,
                "textfont": {"size": size},
                "hoverinfo": "skip",
                "cliponaxis": False,
            }
        )
    return notes
