"""What is remembered of a file: what was found, of that file as it was, by that checksum."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest

from twell.workbench.run.checks import verified
from twell.workbench.run.checks.verified import faults
from twell.workbench.run.homes import summary_home

RIGHT = hashlib.sha256(b"rows").hexdigest()
DIFFERS = "differs from its checksum in the manifest"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one file, old enough that what is found of it is remembered."""
    (tmp_path / "part").write_bytes(b"rows")
    time.sleep(2e-9 * verified.TICK)
    return tmp_path


def test_a_file_that_was_whole_by_one_checksum_is_damaged_by_another(folder: Path) -> None:
    for _ in range(2):  # the second time from memory
        assert faults(folder, {"part": RIGHT}) == {}
    for _ in range(2):
        assert faults(folder, {"part": "0" * 64}) == {"part": DIFFERS}
    assert faults(folder, {"part": RIGHT}) == {}


def test_a_file_that_changes_while_it_is_checked_is_read_again(folder: Path) -> None:
    def check(file: str) -> str:
        (folder / file).write_bytes(b"other rows")
        time.sleep(2e-9 * verified.TICK)
        return ""

    assert faults(folder, {"part": RIGHT}, check, "columns") == {}, "it was whole when it was read"
    assert str(folder) not in {where for where, *_ in verified._memory}
    assert faults(folder, {"part": RIGHT}) == {"part": DIFFERS}


def test_notes_about_a_run_that_stays_as_it_is_lie_in_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site-packages may be writable: what is written there outlives the package. A later process finds them."""
    (folder / "summary").mkdir()
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(summary_home, "_ships", lambda run: run == folder)
    monkeypatch.setattr(verified, "COARSE_TICK", 0)
    assert faults(folder, {"part": RIGHT}) == {}
    assert not list((folder / "summary").iterdir()) and len(list(cache.rglob("verified.json"))) == 1
    verified._memory.clear()
    with monkeypatch.context() as later:
        later.setattr(verified, "checksum", lambda path: pytest.fail(f"{path} is read again"))
        assert faults(folder, {"part": RIGHT}) == {}
    verified._memory.clear()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert faults(folder, {"part": RIGHT}) == {}, "without a home each process reads for itself"
