"""What changes without a neuron, and between two runs: numbers stand under their names, on any width."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from twell.app.runs import changes_view
from twell.app.text import silenced_view
from twell.app.text.choices import PassageChoice
from twell.app.ui.styles import CSS
from twell.workbench.run.store import Run


@pytest.fixture
def page(browser: Any) -> Any:
    return browser.new_page(viewport={"width": 1000, "height": 600})


def right_edges(page: Any, row: str) -> list[float]:
    return [box["x"] + box["width"] for box in (cell.bounding_box() for cell in page.locator(f"{row} > *").all())]


def test_predictions_stand_under_their_names(page: Any, made_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silenced_view, "link", lambda page, **_: page)
    choice = PassageChoice(made_run, None, 0, "L1/N3", None, made_run, None, False)
    frame = pd.DataFrame(
        {"position": [3, 4], "token_id": made_run.vocab.index[5:7], "loss": [4.79, 2.0], "loss_without": [9.51, 1.5]}
    )
    frame["change"] = frame["loss_without"] - frame["loss"]
    page.set_content(CSS + silenced_view.changes_html(choice, frame, made_run))
    assert right_edges(page, ".names")[2:] == pytest.approx(right_edges(page, "a.worse")[2:], abs=1)
    colours = [
        page.locator(f"a.{kind} b").evaluate("bar => getComputedStyle(bar).backgroundColor")
        for kind in ("worse", "better")
    ]
    assert colours == ["rgb(201, 130, 31)", "rgb(47, 126, 216)"]


@pytest.mark.parametrize("width", [390, 800, 1440])
def test_changes_between_runs_can_be_read(page: Any, width: int) -> None:
    """A line of words has less than four lines."""
    page.set_viewport_size({"width": width, "height": 600})
    row = {
        "number": "nnz_mean",
        "value": 36.1,
        "first": 7.5,
        "difference": 28.6,
        "low": 27.0,
        "high": 30.0,
        "ratio": 4.8,
    }
    frame = pd.DataFrame([row | {"ratio_low": 4.72, "ratio_high": 4.87, "of_whole": 0.4, "evidence": "clear"}])
    page.set_content(CSS + changes_view.changes_html(frame, ("demo", "h200-28x2048-training")))
    for cell in page.locator(".tw-changes span").all():
        box = cell.bounding_box()  # None: not drawn
        assert box is None or box["height"] < 80, cell.text_content()
