"""Runs that ship with the package: of this revision, and never written to."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pandas as pd
import pytest

from twell.analysis import by_layer, by_token, ensure
from twell.analysis.summaries.built import read_built
from twell.workbench.run.checks import summary_home
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


def test_summaries_of_another_revision_are_built_in_the_cache(
    small: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And found there by the next reader; in a run of one's own they are replaced where they are."""
    expected = by_layer(small), by_token(small)
    built = small.summary_path("layers").parent / "built.json"
    built.write_text(json.dumps({**json.loads(built.read_text()), "revision": SUMMARIES.revision - 1, "sha256": ""}))
    before = files(small.path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as package:
        package.setattr(summary_home.resources, "files", lambda _: tmp_path)
        summary_home._ships.cache_clear()
        for _ in range(2):
            shipped = open_run(small.path)
            pd.testing.assert_frame_equal(by_layer(shipped), expected[0])
            pd.testing.assert_frame_equal(by_token(shipped), expected[1])
            written = files(tmp_path / "cache")
        assert {name for name, sha256 in files(small.path).items() if before.get(name) != sha256} <= {
            "summary/verified.json"
        }
        assert written and written == files(tmp_path / "cache")
        state = shipped.summary_path("layers").stat()
        ensure(open_run(small.path))
        assert shipped.summary_path("layers").stat() == state
    summary_home._ships.cache_clear()
    ensure(open_run(small.path))
    assert read_built(open_run(small.path)).revision == SUMMARIES.revision
    assert built.parent == open_run(small.path).summary_path("layers").parent
