"""Small multiples: every value lies at its place in its own panel, and ticks are named where their values lie."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from twell.analysis.figures.small_multiples import _steps, small_multiples
from twell.analysis.figures.style import log_ticks

NEAR = 1e-5  # of a panel's width or height, a hundredth of a pixel


@pytest.fixture
def frame() -> pd.DataFrame:
    """Fourteen layers of six positions, the first of them apart; layer k's line stands at 1 + k / 20."""
    rows = [
        {"layer": layer, "position": max(p, 0.5), "first": p == 0, "relative": 1 + layer / 20, "hover": f"{layer}:{p}"}
        for layer in range(14)
        for p in (0, 1, 3, 10, 30, 100)
    ]
    table = pd.DataFrame(rows)
    return table.assign(low=table["relative"] - 0.05, high=table["relative"] + 0.05)


@pytest.mark.parametrize("log_y", [False, True])
def test_lines_lie_in_their_panels_at_the_ticks_of_their_values(frame: pd.DataFrame, log_y: bool) -> None:
    figure = small_multiples(frame, "position", {k: f"L{k}" for k in range(14)}, "x", "y", log=True, log_y=log_y)
    traces = {trace.name: trace for trace in figure.data if trace.name}
    titles, bottom = traces["titles"], traces["x ticks"]
    corners = {int(text[1:]): (x, y - 1) for x, y, text in zip(titles.x, titles.y, titles.text, strict=True)}
    (line,) = [trace for trace in figure.data if trace.line.color == "#2f7ed8" and trace.text is not None]
    tens = {
        round(x - left, 9)
        for x, text in zip(bottom.x, bottom.text, strict=True)
        if text == "10"
        for left, _ in corners.values()
        if 0 <= x - left <= 1
    }
    assert len(tens) == 1, "a tick has one place in every panel"
    heights = []
    for x, y, text in zip(line.x, line.y, line.text, strict=True):
        if text is None:
            continue
        layer, position = map(int, text.split(":"))
        left, foot = corners[layer]
        assert -NEAR <= x - left <= 1 + NEAR
        assert -NEAR <= y - foot <= 1 + NEAR
        if position == 10:
            assert x - left == pytest.approx(tens.copy().pop(), abs=NEAR)
            heights.append(y - foot)
    values = 1 + np.arange(14) / 20
    wanted = np.log(values) if log_y else values
    steps = np.diff(heights) / np.diff(wanted)
    np.testing.assert_allclose(steps, steps[0], rtol=0.001)
    assert steps[0] > 0


def test_the_first_position_stands_apart_from_the_line(frame: pd.DataFrame) -> None:
    figure = small_multiples(frame, "position", dict.fromkeys(range(14), ""), "x", "y", log=True)
    (dots,) = [trace for trace in figure.data if trace.mode == "markers"]
    assert list(dots.text) == [f"{layer}:0" for layer in range(14)]
    (line,) = [trace for trace in figure.data if trace.line.color == "#2f7ed8" and trace.text is not None]
    assert not any(text and text.endswith(":0") for text in line.text)
    assert math.isclose(dots.x[1] - dots.x[0], line.x[6] - line.x[0], abs_tol=NEAR)


def test_a_fit_is_drawn_in_the_layers_that_have_one(frame: pd.DataFrame) -> None:
    frame["fit"] = frame["relative"].where(frame["layer"].isin([2, 5]) & ~frame["first"])
    figure = small_multiples(frame, "position", dict.fromkeys(range(14), ""), "x", "y", log=True)
    (fit,) = [trace for trace in figure.data if trace.line.dash == "dash"]
    assert np.isfinite(fit.x).sum() == 2 * 5
    (dots,) = [trace for trace in figure.data if trace.mode == "markers"]
    assert fit.line.color != dots.marker.color, "one colour, one meaning"


def test_without_intervals_there_are_lines_alone(frame: pd.DataFrame) -> None:
    frame[["low", "high"]] = math.nan
    figure = small_multiples(frame, "position", dict.fromkeys(range(14), ""), "x", "y", log=True)
    (line,) = [trace for trace in figure.data if trace.line.color == "#2f7ed8" and trace.text is not None]
    assert np.isfinite(line.y).sum() == 14 * 5
    (band,) = [trace for trace in figure.data if trace.fill == "toself"]
    assert np.isnan(band.x).all()


@pytest.mark.parametrize(("low", "high"), [(0.02, 9.7), (0.8, 1.8), (0.0, 1.0), (3.0, 13.5), (0.9, 1.1), (0.0, 2.6)])
def test_a_linear_axis_names_two_to_six_round_values(low: float, high: float) -> None:
    ticks = _steps(low, high)
    assert 2 <= len(ticks) <= 6
    assert low <= min(ticks) < max(ticks) <= high
    assert max(map(len, ticks.values())) <= 4


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (1, 768),
        (21, 46),
        (3.8, 9.1),
        (1, 60_000),
        (0.002, 0.9),
        (100, 195),
        (610, 690),
        (1.1, 1.9),
        (92, 195),
        (85, 115),
    ],
)
def test_a_logarithmic_axis_names_two_values_or_more(low: float, high: float) -> None:
    ticks, names = log_ticks(low, high)
    assert 2 <= len(ticks) == len(set(names)) <= 8
    assert low <= ticks[0] < ticks[-1] <= high


@pytest.mark.parametrize(("spread", "fewest"), [(0.02, 2), (0.3, 2), (4.0, 3)])
def test_a_logarithmic_axis_names_more_than_one(frame: pd.DataFrame, spread: float, fewest: int) -> None:
    """A lone 1 does not say how far a line goes from it: nnz may differ by two per cent along a sequence."""
    flat = frame.assign(relative=1.0, low=1 / (1 + spread), high=1 + spread)
    titles = {k: f"L{k}" for k in range(14)}
    figure = small_multiples(flat, "position", titles, "x", "y", log=True, log_y=True)
    (ticks,) = [trace for trace in figure.data if trace.name == "y ticks"]
    assert len(set(ticks.text)) >= fewest
    assert "1 " in ticks.text
