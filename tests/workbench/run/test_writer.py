"""When the manifest changes: with each part, once, and with the last one it says how the run ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import COMPLETE, INTERRUPTED, RECORDING, Manifest
from twell.workbench.run.store import open_run
from twell.workbench.run.writer import RunWriter

Maker = Callable[..., Any]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """List the status and the number of files in each manifest that is written."""
    said: list[tuple[str, int]] = []
    write = manifests.write

    def tells(folder: Path, manifest: Manifest) -> None:
        write(folder, manifest)
        said.append((manifest.status, len(manifest.parts)))

    monkeypatch.setattr(manifests, "write", tells)
    return said


def test_a_manifest_a_part(
    tmp_path: Path, make_manifest: Maker, make_activity: Maker, published: list[tuple[str, int]]
) -> None:
    run = RunWriter(tmp_path / "run", make_manifest())
    for _part in range(2):
        run.add("activity", make_activity(5, 10))
        run.close_part(seconds=1.0)
    run.add("activity", make_activity(5, 10))
    run.finish(seconds=2.0)
    assert published == [(RECORDING, 0), (RECORDING, 1), (RECORDING, 2), (COMPLETE, 3)]
    found = open_run(tmp_path / "run").manifest
    assert (found.status, found.seconds, found.tokens) == (COMPLETE, 2.0, 150)


def test_a_run_that_ends_with_a_part_says_so_without_one(
    tmp_path: Path, make_manifest: Maker, make_activity: Maker, published: list[tuple[str, int]]
) -> None:
    run = RunWriter(tmp_path / "run", make_manifest())
    run.add("activity", make_activity(5, 10))
    run.close_part()
    run.finish(INTERRUPTED, loss_sum=7.0)
    assert published == [(RECORDING, 0), (RECORDING, 1), (INTERRUPTED, 1)]
    assert open_run(tmp_path / "run").manifest.loss_sum == 7.0
