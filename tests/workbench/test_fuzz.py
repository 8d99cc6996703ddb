"""Odd texts and models, each read whole or refused in one sentence; and what their limits say. Cost: 8 s.

A failure is one case again by its number: python -m support.fuzz texts --only NUMBER, with PYTHONPATH=tests
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.fuzz import FAILED, REFUSED, SAME, models, texts

from twell.workbench import open_run
from twell.workbench.capturing import prefetch
from twell.workbench.errors import LONGEST, UserError, quoted, usable
from twell.workbench.text import sequences, streams, tables
from twell.workbench.text.sources import TextSource, open_sources


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the limits that a fuzzer sets."""
    monkeypatch.setattr(streams, "LONGEST", streams.LONGEST)
    monkeypatch.setattr(tables, "LONGEST", tables.LONGEST)


@pytest.mark.usefixtures("limits")
@pytest.mark.parametrize(("subject", "cases"), [(texts, 120), (models, 50)])
def test_odd_inputs_are_read_or_refused(subject: Any, cases: int, tmp_path: Path) -> None:
    case = subject.cases(tmp_path, seed=0)
    outcomes = [(number, outcome) for number in range(cases) for outcome in case(number)]
    assert not [(number, outcome.where, outcome.details) for number, outcome in outcomes if outcome.kind == FAILED]
    kinds = [outcome.kind for _, outcome in outcomes]
    assert kinds.count(SAME) > cases / 8 and kinds.count(REFUSED) > cases / 8


@pytest.mark.usefixtures("limits")
def test_the_fuzzer_sees_another_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = texts.cases(tmp_path, seed=0)
    read = streams.json_texts
    monkeypatch.setattr(streams, "json_texts", lambda *given: (text.replace("w", "v") for text in read(*given)))
    assert any(outcome.kind == FAILED for number in range(25) for outcome in case(number))


def test_a_message_is_one_line_that_can_be_printed() -> None:
    text = str(UserError("Expected a name, got \x1b[31m\nred \udc80: " + "a" * 5000 + " rename it."))
    assert text.isprintable() and len(text) < LONGEST + 10
    assert text.startswith("Expected a name, got \\x1b[31m\\nred \\udc80: aaa") and text.endswith("aaa rename it.")
    assert quoted(["a" * 100, *map(str, range(20))]).endswith("9, 10 and 9 more")
    for name, got in (("a" * 300, "got one of 300 characters"), ("a\0b", "null character"), ("\udc80", "UTF-8")):
        with pytest.raises(UserError, match=got):
            usable(name)
        with pytest.raises(UserError, match=got):
            open_run(name)
        with pytest.raises(UserError, match="Expected a name"):
            open_sources([f"{name}.txt"])


def test_a_tokenizer_that_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "PIECE_SECONDS", 0.1)
    monkeypatch.setattr(prefetch, "POLL_SECONDS", 0.05)
    tokenizing, released, ended = sequences.Tokenizing(), threading.Event(), threading.Event()

    def items() -> Iterator[int]:
        yield 1
        with tokenizing.working(1):
            released.wait(60)
        ended.set()

    ahead = prefetch._ahead(items(), tokenizing)
    assert next(ahead) == 1
    with pytest.raises(UserError, match="got one that does not end: correct the patterns"):
        next(ahead)
    assert not ended.is_set()
    released.set()
    assert list(prefetch._ahead(iter([1, 2, 3]), sequences.Tokenizing())) == [1, 2, 3]


def test_a_tokenizer_that_panics_ends_in_a_sentence() -> None:
    class Panic(BaseException):
        pass

    with (
        pytest.raises(UserError, match=r"got an error of it \(Onig: too far\): correct"),
        sequences.Tokenizing().working(1),
    ):
        raise Panic("Onig: too far")


def test_a_closed_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    for closed in (None, SimpleNamespace(closed=True)):
        monkeypatch.setattr("sys.stdin", closed)
        with pytest.raises(UserError, match="got one that is closed: pipe text into the command"):
            TextSource("-")
