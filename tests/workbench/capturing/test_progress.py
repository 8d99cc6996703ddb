"""How far passes over a text are, where there is no terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from support.clock import Clock

from twell.workbench.capturing import progress
from twell.workbench.capturing.progress import Batches


@pytest.mark.parametrize("quiet", [False, True])
def test_lines_come_seldom_and_tell_the_time_that_is_left(quiet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, file = Clock(), io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    with Batches(Console(file=file, quiet=quiet)) as batches:
        for batch in range(12):
            clock.now += 4.0 if batch < 11 else 600.0  # a line is due then, but nothing is left
            batches.advance(12)
    due = ["1 of 12 batches", "2 of 12 batches, about 40 s left", "6 of 12 batches, about 24 s left"]
    due += ["9 of 12 batches, about 12 s left"]
    assert file.getvalue().splitlines() == ([] if quiet else due)


def test_a_bar_on_a_terminal_leaves_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, file = Clock(), io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    with Batches(Console(file=file, force_terminal=True)) as batches:
        for _ in range(3):
            clock.now += 60.0
            batches.advance(3)
    assert "left" not in file.getvalue() and "batches" in file.getvalue()
