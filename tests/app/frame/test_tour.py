"""The tour of a first visit: five steps, left at any of them, and gone for good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from twell.app.frame import tour
from twell.workbench.errors import UserError

Show = Callable[..., AppTest]


def text_of(test: AppTest) -> str:
    return "".join(str(element.proto.body) for element in test.get("html"))


def test_it_is_left_at_any_step_and_does_not_come_back(
    show: Show, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tour, "marker", lambda: tmp_path / "cache" / "seen")
    assert "1 of 5" not in text_of(show(runs, "export", run="made")), "it begins on the front page"
    test = show(runs, run="summary")
    for number in range(1, len(tour.STEPS) + 1):
        assert f"{number} of 5" in text_of(test)
        if number < len(tour.STEPS):
            test.button(key="tour-next").click().run()
    assert not (tmp_path / "cache").exists()
    test.button(key="tour-leave").click().run()
    assert not test.exception
    assert " of 5 ·" not in text_of(test)
    assert " of 5 ·" not in text_of(show(runs, run="summary")), "another visit"


def test_a_folder_that_cannot_be_written_to_stops_nobody(
    show: Show, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(tour, "marker", lambda: tmp_path / "file" / "seen")
    test = show(runs, run="summary")
    test.button(key="tour-leave").click().run()
    assert not test.exception
    assert " of 5 ·" not in text_of(test)


@pytest.mark.parametrize("error", [PermissionError("denied"), UserError("no home")])
def test_a_home_that_is_missing_or_not_to_be_read_stops_nobody(
    error: Exception, show: Show, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tour, "marker", lambda: (_ for _ in ()).throw(error))
    test = show(runs, run="summary")
    assert "1 of 5" in text_of(test)
    test.button(key="tour-leave").click().run()
    assert not test.exception
    assert " of 5 ·" not in text_of(test)
