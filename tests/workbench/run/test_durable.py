"""A run survives a power cut: its files are on disk before they take their names, and their folder after it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.durable import Durable

from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import Manifest
from twell.workbench.run.store import open_run
from twell.workbench.run.writer import RunWriter


def test_what_a_run_lists_is_on_disk(
    tmp_path: Path,
    make_manifest: Callable[..., Manifest],
    make_activity: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = Durable(monkeypatch)
    writer = RunWriter(tmp_path / "run", make_manifest())
    for close in (writer.close_part, writer.finish):
        writer.add("activity", make_activity(2, 5))
        close()
    run = open_run(tmp_path / "run")
    assert disk.renamed[0] == disk.renamed[-1] == manifests.FILE
    for path in [*run.parts("activity"), run.path / manifests.FILE, run.path / "activity", run.path]:
        assert disk.holds(path), f"{path.name} may be gone after a power cut"


def test_the_check_fails_where_a_file_is_renamed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Durable(monkeypatch)
    (tmp_path / "new").write_text("words")
    with pytest.raises(AssertionError, match="new takes its name before it is on disk"):
        os.replace(tmp_path / "new", tmp_path / "old")
    assert disk.renamed == []
