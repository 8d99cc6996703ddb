"""What the server holds of a run: parts of timings and the vocabulary are read once, and never an old one."""

from __future__ import annotations

import gc
import time
import weakref
from pathlib import Path
from types import ModuleType

import pandas as pd
import pyarrow.parquet as pq
import pytest

from twell.analysis import speedup, timings_by_batch
from twell.app.ui import run_cache as module
from twell.app.ui.run_cache import LiveRun, cached_run, digest, open_cached
from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.checks import verified
from twell.workbench.run.part_files import LIVE
from twell.workbench.run.store import Run, open_run


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are read from now on."""
    files: list[str] = []

    class Noted(pq.ParquetFile):
        def __init__(self, path: Path, **options: object) -> None:
            files.append(Path(path).name if "timings" not in str(path) else "timings/" + Path(path).name)
            super().__init__(path, **options)

    monkeypatch.setattr(pq, "ParquetFile", Noted)
    return files


def test_a_part_of_the_timings_is_read_once(made: ModuleType, tmp_path: Path, read: list[str]) -> None:
    path = made.make(tmp_path / "one", layers=3, sequences=20, timings=2, parts=2).path
    time.sleep(2e-9 * verified.TICK)  # what was checked of a file that may still change in this tick is not held
    plain = speedup(open_run(path))
    many = sum(part.table == "timings" for part in open_run(path).manifest.parts)
    read.clear()
    for _ in range(3):
        pd.testing.assert_frame_equal(speedup(cached_run(open_run(path))), plain)
        pd.testing.assert_frame_equal(timings_by_batch(cached_run(open_run(path))), timings_by_batch(open_run(path)))
    first = [file for file in read if file.startswith("timings")]
    assert len(first) == many + 3 * many, "once by the kept run, and each time by the other"
    read.clear()
    only = cached_run(open_run(path)).arrow("timings", ["batch"])
    assert only.column_names == ["batch"]
    assert read == []


def test_a_part_of_the_same_name_and_other_content_is_another(made: ModuleType, tmp_path: Path) -> None:
    before = speedup(cached_run(made.make(tmp_path / "run", layers=3, sequences=20, seed=1)))
    for file in sorted((tmp_path / "run").rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    (tmp_path / "run").rmdir()
    run = made.make(tmp_path / "run", layers=3, sequences=20, seed=2)
    after = speedup(cached_run(run))
    pd.testing.assert_frame_equal(after, speedup(run))
    assert after["dense_us"].tolist() != before["dense_us"].tolist()


def test_the_vocabulary_is_read_once_a_run(made_run: Run, read: list[str]) -> None:
    first = cached_run(open_run(made_run.path)).vocab
    read.clear()
    again = cached_run(open_run(made_run.path)).vocab
    assert again is first
    assert read == []
    pd.testing.assert_frame_equal(again, open_run(made_run.path).vocab)
    assert read == ["vocab.parquet"], "by the run that is not kept"


def test_what_cannot_be_read_is_said_and_not_kept(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "run", layers=3, sequences=20)
    part = run.parts("timings")[0]
    whole = part.read_bytes()
    part.write_bytes(whole[:50])
    with pytest.raises(UserError, match="readable part"):
        speedup(cached_run(run))
    part.write_bytes(whole)
    assert len(speedup(cached_run(run))) == 3
    assert digest(cached_run(run)) == digest(run)
    assert module.TIMING_PARTS * 10 >= 86_400, "a day of parts of ten seconds"


def test_what_is_held_of_a_run_does_not_grow_with_its_versions(made: ModuleType, tmp_path: Path) -> None:
    """A capture of a night has thousands of versions, each of which lists every part."""
    path = made.make(tmp_path / "run", layers=3, sequences=20, timings=2).path
    old = open_cached(path)
    assert open_cached(path) is old
    old.arrow("timings")
    held = weakref.ref(old), weakref.ref(old.manifest)
    manifests.update(path, seconds=old.manifest.seconds + 1)
    new = open_cached(path)
    assert new is not old and new.manifest.seconds == old.manifest.seconds + 1
    new.arrow("timings")
    del old
    gc.collect()
    assert [each() for each in held] == [None, None]


@pytest.mark.parametrize("recorded", [0, 1])
def test_a_run_has_the_timings_that_no_part_holds_yet(made: ModuleType, tmp_path: Path, recorded: int) -> None:
    """While it is recorded, and no other table for their sake."""
    run = made.make(tmp_path / "run", layers=2, sequences=4, timings=recorded)
    timed = made.make(tmp_path / "timed", layers=2, sequences=4, timings=1)
    pq.write_table(timed.arrow("timings"), run.path / LIVE)
    for status, live in ((manifests.RECORDING, True), (manifests.COMPLETE, False)):
        manifests.update(run.path, status=status)
        now = LiveRun(run.path, open_run(run.path).manifest)
        assert now.has("timings") == (live or bool(recorded))
        assert now.has("activity") and not now.has("bench")
