"""The small figure of a claim: its marks stand where the tables say."""

from __future__ import annotations

import base64
import re
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from twell.analysis import by_layer, findings, token_classes
from twell.analysis.figures.claims.drawings import FOOT, HEAD, HEIGHT, bars, curve, intervals
from twell.analysis.figures.claims.evidence import DRAWINGS, drawing, drawings
from twell.workbench.run.store import Run, open_run


def svg(image: str) -> str:
    """Return what an image holds."""
    (content,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', image)
    return base64.b64decode(content).decode()


def test_bars_are_as_tall_as_their_values_and_the_bound_lies_among_them() -> None:
    drawn = svg(bars(np.array([1.0, 4.0, np.nan]), ["a", "b", "<c>"], "says", "{:.0f} ×", limit=2.0, limit_name="two"))
    heights = [float(text) for text in re.findall(r'height="([\d.]+)" fill', drawn)]
    room = HEIGHT - FOOT - HEAD
    assert heights == pytest.approx([room / 4, room, 0.5], abs=0.06)
    (bound,) = re.findall(r'y1="([\d.]+)"', drawn)
    assert float(bound) == pytest.approx(HEIGHT - FOOT - room / 2, abs=0.06)
    assert ">4 ×<" in drawn and ">two<" in drawn and "&lt;c&gt;" in drawn and "<c>" not in drawn


def test_intervals_keep_their_order_along_the_line() -> None:
    drawn = svg(intervals([("x", 1.0, 0.5, 2.0), ("y", 3.0, np.nan, np.nan)], 0.0, "zero", "says"))
    low, high = map(float, re.findall(r'x1="([\d.]+)" x2="([\d.]+)" y1="9"', drawn)[0])
    first, second = (float(text) for text in re.findall(r'cx="([\d.]+)"', drawn))
    zero = float(re.findall(r'x1="([\d.]+)"', drawn)[0])
    assert zero < low < first < high < second
    assert (first - zero) / (second - zero) == pytest.approx(1 / 3, abs=0.01)
    assert len(re.findall(r'y1="9"', drawn)) == 1, "one value has no interval"
    assert ">−1.00<" in svg(intervals([("x", -1.0, -2.0, 0.0)], 0.0, "zero", "says")), (
        "a minus, as in the text beside it"
    )


def test_a_curve_falls_where_its_values_do() -> None:
    points = re.findall(r'points="([^"]+)"', svg(curve(np.arange(3), np.array([3, 2, 0]), ("a", "b"), "says")))[0]
    down = [float(point.split(",")[1]) for point in points.split()]
    assert down == sorted(down) and down[-1] == HEIGHT - FOOT


def test_every_claim_that_a_run_can_test_is_drawn_from_its_own_tables(run: Run) -> None:
    tested = findings(run).query("verdict != 'cannot be told'")["claim"]
    drawn = drawings(run)
    assert set(tested) & set(DRAWINGS) <= set(drawn)
    assert len(set(tested) - set(DRAWINGS)) <= 1, "the gain of a training step alone has none"
    share = 100 * by_layer(run)["mean"].max() / run.d_ff
    assert f">{share:.2f} %<" in svg(
        drawn["A little L1 leaves about half a percent of a layer's neurons firing (29 of 5632)."]
    )
    words = token_classes(run).set_index("class")
    if "function word" in words.index:
        difference = f"{words.loc['function word', 'difference']:+.2f}".replace("-", "−")
        assert f">{difference}<" in svg(drawn["Function words fire little."])
    assert drawing(run, "no such claim") == ""


def test_what_the_bench_settles_is_drawn_from_it() -> None:
    """The recorded run timed one batch whole, which gives no interval and, without a reading of power, no energy."""
    run = open_run(Path(str(resources.files("twell.data"))) / "recorded" / "h200-28x2048")
    drawn, said = drawings(run), findings(run).set_index("claim")["this_run"]
    faster = "The forward pass gains 17 to 20.5 % at 0.5 to 2 B parameters."
    energy = "Energy per token falls by 11.8 to 17 %."
    (ratio,) = re.findall(r"runs ([\d.]+) times", said[faster])
    (saved,) = re.findall(r"takes (\d+) ?% less", said[energy])
    assert f">{ratio} ×<" in svg(drawn[faster]) and f">{100 - int(saved)} %<" in svg(drawn[energy])
    assert not [claim for claim, image in drawn.items() if "nan" in svg(image)]
