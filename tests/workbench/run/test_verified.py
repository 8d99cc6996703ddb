"""What is remembered of a file: what was found, of that file as it was, by that checksum."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest

from twell.workbench.run.checks import verified
from twell.workbench.run.checks.verified import faults

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
