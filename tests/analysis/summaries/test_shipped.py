"""Runs that ship with the package: of this revision, and never written to."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib import resources
from pathlib import Path

import pandas as pd
import pytest

from twell.analysis import by_layer, by_token, ensure
from twell.analysis.summaries.built import read_built
from twell.workbench.run.homes import summary_home
from twell.workbench.run.part_files import checksum
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run, list_runs, open_run


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): checksum(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def test_runs_with_rows_ship_with_summaries_of_this_revision() -> None:
    """Others would be built anew by everyone who opens them: `python data/recorded/ship.py RUN RUN --rows` does it."""
    runs, _ = list_runs(Path(str(resources.files("twell.data"))) / "recorded")
    with_rows = [run for run in runs if run.has("activity")]
    assert with_rows
    for run in with_rows:
        built = run.path / "summary" / f"v{SUMMARIES.version}" / "built.json"
        assert json.loads(built.read_text())["revision"] == SUMMARIES.revision, run.name


def ships(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary_home.resources, "files", lambda _: run.path.parent)


def is_tracked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout with another working tree beside it, as in the package's own when another is installed."""
    if shutil.which("git") is None:
        pytest.skip("no git on this machine")
    git = partial(subprocess.run, check=True, capture_output=True, cwd=run.path.parent)
    git(["git", "init", "--quiet", "."])
    git(["git", "add", f"{run.path.name}/run.json"])


def is_not_writable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests as root may write anywhere."""
    monkeypatch.setattr(summary_home.os, "access", lambda path, mode: not Path(path).is_relative_to(run.path))


def forget() -> None:
    for cached in (summary_home._ships, summary_home._is_tracked):
        cached.cache_clear()


@pytest.mark.parametrize("stays", [ships, is_tracked, is_not_writable])
def test_summaries_of_another_revision_are_built_in_the_cache(
    small: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays: Callable[[Run, pytest.MonkeyPatch], None]
) -> None:
    """And found there by the next reader; in a run of one's own they are replaced where they are."""
    expected = by_layer(small), by_token(small)
    built = small.summary_path("layers").parent / "built.json"
    built.write_text(json.dumps({**json.loads(built.read_text()), "revision": SUMMARIES.revision - 1, "sha256": ""}))
    before = files(small.path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as place:
        stays(small, place)
        forget()
        for _ in range(2):
            shipped = open_run(small.path)
            pd.testing.assert_frame_equal(by_layer(shipped), expected[0])
            pd.testing.assert_frame_equal(by_token(shipped), expected[1])
            written = files(tmp_path / "cache")
        assert files(small.path) == before
        assert written and written == files(tmp_path / "cache")
        state = shipped.summary_path("layers").stat()
        ensure(open_run(small.path))
        assert shipped.summary_path("layers").stat() == state
    shutil.rmtree(small.path.parent / ".git", ignore_errors=True)
    forget()
    ensure(open_run(small.path))
    assert read_built(open_run(small.path)).revision == SUMMARIES.revision
    assert built.parent == open_run(small.path).summary_path("layers").parent


def test_what_git_tracks_is_told_without_git(small: Run, tmp_path: Path) -> None:
    """A folder from elsewhere may tell git to run commands."""
    checkout, run = small.path.parent, small.path
    assert not summary_home._is_tracked.__wrapped__(run), "in no checkout"
    (checkout / ".git").mkdir()
    (checkout / ".git" / "index").write_bytes(b"DIRC" + f"{run.name}/run.jso".encode() + b"\0")
    assert not summary_home._is_tracked.__wrapped__(run)
    (elsewhere := tmp_path / "of-the-tree").mkdir()
    (elsewhere / "index").write_bytes(b"DIRC" + f"{run.name}/run.json".encode() + b"\0")
    shutil.rmtree(checkout / ".git")
    (checkout / ".git").write_text(f"gitdir: {elsewhere}\n")
    assert summary_home._is_tracked.__wrapped__(run), "of a further working tree"
    (checkout / ".git").write_bytes(b"gitdir: \xff\0")
    assert not summary_home._is_tracked.__wrapped__(run)
