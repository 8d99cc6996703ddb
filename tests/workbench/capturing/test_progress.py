"""How far passes over a text are, where there is no terminal, and what a capture tells of itself."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from support.captures import run_capture
from support.clock import Clock

from twell.workbench.capturing import progress
from twell.workbench.capturing.progress import Bar, Batches


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


def test_each_token_of_a_capture_is_told_once(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the batch after it: those of the last batch come when all is written."""
    told, advance = list[int](), Bar.advance

    def tells(bar: Bar, tokens: int, nnz_mean: float | None, aside: float = 0.0) -> None:
        told.append(tokens)
        advance(bar, tokens, nnz_mean, aside)

    monkeypatch.setattr(Bar, "advance", tells)
    run = run_capture(tiny, tmp_path / "run", texts, seq_len=24, batch_tokens=48)
    assert len(told) > 4 and told[0] == 0
    assert 0 < run.manifest.tokens - sum(told) <= 48
