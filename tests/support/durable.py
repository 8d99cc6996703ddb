"""What is on disk before it takes its name, so that a power cut leaves the file of before or the whole new one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Durable:
    """Notes what is synced; a file that is renamed before it was fails the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.renamed: list[str] = []
        self._synced: set[int] = set()
        self._fsync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self._on_fsync)
        monkeypatch.setattr(os, "replace", self._on_replace)

    def holds(self, path: Path) -> bool:
        """Return whether a file or folder was synced as it is."""
        return path.stat().st_ino in self._synced

    def _on_fsync(self, handle: int) -> None:
        self._fsync(handle)
        self._synced.add(os.fstat(handle).st_ino)

    def _on_replace(self, path: Path, target: Path) -> None:
        assert self.holds(Path(path)), f"{Path(path).name} takes its name before it is on disk"
        self._replace(path, target)
        self._synced.discard(Path(target).parent.stat().st_ino)  # the folder has a new entry
        self.renamed.append(Path(target).name)
