"""What other pages begin with is answered before they are opened, under the arguments that they ask with."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from twell import analysis
from twell.app.server import warm_up
from twell.app.ui import url_state
from twell.app.ui.run_cache import kept
from twell.workbench.run.store import Run, open_run

BEGIN = warm_up._begin  # before the fixtures put it aside
LOOKS: tuple[tuple[str, dict[str, str]], ...] = (
    ("overview", {}),
    ("tokens", {}),
    ("tokens", {"view": "words"}),
    ("tokens", {"view": "classes"}),
    ("token", {"token": "40"}),
    ("layers", {}),
    ("layers", {"of": "own"}),
    ("positions", {}),
    ("neurons", {}),
    ("findings", {}),
)


@pytest.fixture
def begun(show: Callable[..., AppTest], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The runs that pages begin to read ahead, which nothing does meanwhile."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(warm_up, "_begin", lambda *run: found.append(run))
    return found


def test_pages_find_their_first_answers(
    show: Callable[..., AppTest], runs: Path, made_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "PAUSE", 0.0)
    monkeypatch.setattr(warm_up, "GAP", 0.0)
    url_state._answer.clear()
    BEGIN.__wrapped__(str(made_run.path), url_state.digest(made_run)).join()
    again: list[str] = []
    for question, _ in warm_up.QUESTIONS:
        real = question if callable(question) else getattr(analysis, question)

        @wraps(real)
        def once_more(*run: Run, real: Callable[..., Any] = real, **arguments: Any) -> Any:
            again.append(f"{real.__name__} {arguments}")
            return real(*run, **arguments)

        place = real.__module__ if callable(question) else analysis.__name__
        monkeypatch.setattr(f"{place}.{real.__name__}", once_more)
    used: set[str] = set()
    cached = url_state._answer

    def seen(path: str, parts: str, module: str, question: str, arguments: dict[str, Any]) -> Any:
        used.add(f"{question} {arguments}")
        return cached(path, parts, module, question, arguments)

    monkeypatch.setattr(url_state, "_answer", seen)
    for page, address in LOOKS:
        test = show(runs, page, run="made", **address)
        assert not test.exception, (page, [error.value for error in test.exception])
    assert again == []
    names = [question.__name__ if callable(question) else question for question, _ in warm_up.QUESTIONS]
    asked = {f"{name} {arguments}" for name, (_, arguments) in zip(names, warm_up.QUESTIONS, strict=True)}
    assert asked - used == set(), "read ahead and asked by no page"


def test_a_page_begins_once_it_is_drawn_and_a_run_that_grows_is_left_alone(
    show: Callable[..., AppTest], runs: Path, recording: Path, made_run: Run, begun: list[tuple[str, str]]
) -> None:
    show(runs, run="made")
    assert begun == [(str(made_run.path), url_state.digest(made_run))]
    show(recording, run="live")
    assert len(begun) == 1


def test_what_a_run_lacks_and_one_that_has_changed_stop_nothing(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "PAUSE", 0.0)
    monkeypatch.setattr(warm_up, "GAP", 0.0)
    asked: list[str] = []

    def ask(run: Run, question: str | Callable[..., Any], **arguments: Any) -> None:
        asked.append(run.name)
        url_state.ask(run, question, **arguments)

    monkeypatch.setattr(warm_up, "ask", ask)
    counts = kept(open_run(runs / "counts"))  # without neurons and losses
    warm_up._read(str(counts.path), url_state.digest(counts))
    assert len(asked) == len(warm_up.QUESTIONS)
    warm_up._read(str(counts.path), "another state of it")
    warm_up._read(str(runs / "gone"), "any")
    assert len(asked) == len(warm_up.QUESTIONS)
