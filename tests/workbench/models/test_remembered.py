"""Folders of models that this machine remembers, by the checksum of their weights."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import pytest

from twell.workbench.models.remembered import recall, remember


def test_nothing_else_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run from elsewhere names its weights: a path in that place is not opened, which might never end."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    remember("a" * 64, str(tmp_path))
    assert recall("a" * 64) == str(tmp_path)
    os.mkfifo(endless := tmp_path / "endless")
    answers: list[str | None] = []
    reading = Thread(target=lambda: answers.append(recall(str(endless))), daemon=True)
    reading.start()
    reading.join(5)
    assert answers == [None]
