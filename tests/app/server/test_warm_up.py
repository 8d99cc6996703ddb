"""The first results of other pages are computed before they are opened, under the arguments that they use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from twell.app.server import warm_up
from twell.app.ui import query as queries
from twell.app.ui.run_cache import cached_run, digest
from twell.workbench.run.store import Run, open_run

START = warm_up._start_thread  # before the fixtures put it aside
LOOKS: tuple[tuple[str, dict[str, str]], ...] = (
    ("overview", {}),
    ("tokens", {"view": "tokens", "rank": "shrunk"}),
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
    started: list[tuple[str, str]] = []
    monkeypatch.setattr(warm_up, "_start_thread", lambda *run: started.append(run))
    return started


def test_pages_find_their_first_results(
    show: Callable[..., AppTest], runs: Path, made_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up, "PAUSE", 0.0)
    monkeypatch.setattr(warm_up, "GAP", 0.0)
    queries._cached.clear()
    cached = queries._cached
    used, computed = set[str](), list[str]()

    def spy(runs: list[tuple[str, str]], name: str, arguments: dict[str, Any], compute: Callable[[], Any]) -> Any:
        label = f"{name} {sorted(arguments.items())}"
        used.add(label)

        def noted() -> Any:
            computed.append(label)
            return compute()

        return cached(runs, name, arguments, noted)

    monkeypatch.setattr(queries, "_cached", spy)
    START.__wrapped__(str(made_run.path), digest(made_run)).join()
    names = list(computed)
    assert len(names) == len(used) == len(warm_up.default_queries())
    used.clear()
    for page, address in LOOKS:
        test = show(runs, page, run="made", **address)
        assert not test.exception, (page, [error.value for error in test.exception])
    assert [name for name in computed[len(names) :] if name in names] == [], "computed again"
    assert set(names) - used == set(), "computed beforehand and used by no page"


def test_a_page_begins_once_it_is_drawn_and_a_run_that_grows_is_left_alone(
    show: Callable[..., AppTest], runs: Path, recording: Path, made_run: Run, begun: list[tuple[str, str]]
) -> None:
    show(runs, run="made")
    assert begun == [(str(made_run.path), digest(made_run))]
    show(recording, run="live")
    assert len(begun) == 1


def test_what_a_run_lacks_and_one_that_has_changed_stop_nothing(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "PAUSE", 0.0)
    monkeypatch.setattr(warm_up, "GAP", 0.0)
    fetched: list[str] = []

    def fetch(run: Run, query: queries.Query) -> None:
        fetched.append(run.name)
        queries.fetch(run, query)

    monkeypatch.setattr(warm_up, "fetch", fetch)
    counts = cached_run(open_run(runs / "counts"))  # without neurons and losses
    warm_up._compute(str(counts.path), digest(counts))
    assert len(fetched) == len(warm_up.default_queries())
    warm_up._compute(str(counts.path), "another state of it")
    warm_up._compute(str(runs / "gone"), "any")
    assert len(fetched) == len(warm_up.default_queries())
