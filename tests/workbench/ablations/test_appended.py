"""Parts that are appended to a run: whole, or nothing of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from twell.workbench.ablations.appended import append
from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import COMPLETE, Manifest


def test_a_full_disk_leaves_nothing_of_a_part(
    tmp_path: Path, make_manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is full only once the file is closed: what is left of it would take the room that is missing."""
    manifests.write(tmp_path, make_manifest(status=COMPLETE))
    before = manifests.read(tmp_path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    columns = {"batch": [0], "layer": [-1], "op": ["pass"], "phase": [0], "tokens": [1], "nnz_mean": [None]}
    columns |= {"microseconds": [1.0], "kernel": ["dense"]}
    columns |= {name: [None] for name in ("sm_mhz", "watts", "seconds", "load")}
    with pytest.raises(UserError, match="the disk is full"):
        append(tmp_path, "timings", columns)
    assert manifests.read(tmp_path) == before
    assert list((tmp_path / "timings").iterdir()) == []
