"""Where the summaries of a run lie: with it, or in the user's cache where they would have to be written and cannot."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from twell.workbench.errors import UserError
from twell.workbench.run.homes import summary_home as module
from twell.workbench.run.homes.summary_home import summary_home
from twell.workbench.run.schema import SUMMARIES


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run that nobody may write to; the tests' user may be one who may write anywhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (run := tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.setattr(module.os, "access", lambda path, mode: mode != os.W_OK or not Path(path).is_relative_to(run))
    return run


def build(run: Path, stored: Any) -> None:
    (folder := run / "summary" / f"v{SUMMARIES.version}").mkdir(parents=True, exist_ok=True)
    (folder / "built.json").write_text(json.dumps(stored))


def test_a_new_run_that_cannot_be_written_to_is_summarised_in_the_cache(
    locked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of its own: another of its name has another, a link to it the same. Without rows none is built."""
    home = summary_home(locked, summary_only=False)
    assert home.parent == tmp_path / "cache" / "twell" / "summaries" and home.name.startswith("mine-")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "mine").symlink_to(locked)
    (other := tmp_path / "mine").mkdir()
    assert module._in_cache(tmp_path / "link" / "mine") == home != module._in_cache(other)
    assert summary_home(other, summary_only=False) == other, "it may be written to"
    assert summary_home(locked, summary_only=True) == locked
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert summary_home(locked, summary_only=False) == tmp_path / ".cache" / "twell" / "summaries" / home.name


def test_a_run_of_which_the_summaries_alone_may_be_written_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run := tmp_path / "mine").mkdir()
    monkeypatch.setattr(module.os, "access", lambda path, _mode: Path(path).name == "summary")
    assert summary_home(run, summary_only=False) != run
    (run / "summary").mkdir()
    assert summary_home(run, summary_only=False) == run


def test_summaries_of_this_revision_stay_and_of_any_other_are_built_elsewhere(locked: Path) -> None:
    """A list that tells no revision, as of a damaged or hostile run, is of another."""
    for stored in ({"revision": SUMMARIES.revision - 1}, {"revision": [1]}, {}, [], "revision"):
        build(locked, stored)
        assert summary_home(locked, summary_only=False) != locked, stored
    build(locked, {"revision": SUMMARIES.revision})
    assert summary_home(locked, summary_only=False) == locked


def test_a_user_without_a_home_is_told_what_to_set(locked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(UserError, match="Expected a home folder to keep a cache in, found none: set XDG_CACHE_HOME"):
        summary_home(locked, summary_only=False)
