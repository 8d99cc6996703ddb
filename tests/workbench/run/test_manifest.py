"""The manifest: what older versions become, and changes to it as it stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import Manifest

Maker = Callable[..., Manifest]


def test_an_older_manifest_goes_through_every_migration_after_its_own(
    tmp_path: Path, make_manifest: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifests.write(tmp_path, make_manifest())
    path = tmp_path / manifests.FILE
    written = json.loads(path.read_text(encoding="utf-8"))
    del written["sha256"]
    monkeypatch.setattr(manifests, "SCHEMA_VERSION", 3)
    steps = [lambda data, mark=mark: data | {"name": data["name"] + mark} for mark in "ab"]
    monkeypatch.setattr(manifests, "MIGRATIONS", steps)
    for version, marks in ((1, "ab"), (2, "b"), (3, "")):
        path.write_text(json.dumps(written | {"schema_version": version}), encoding="utf-8")
        assert manifests.read(tmp_path).name == written["name"] + marks


def test_a_change_leaves_what_others_changed(tmp_path: Path, make_manifest: Maker) -> None:
    manifests.write(tmp_path, make_manifest())
    before = manifests.read(tmp_path)
    manifests.update(tmp_path, name="other")
    updated = manifests.update(tmp_path, seconds=7.0)
    assert (updated.name, updated.seconds) == ("other", 7.0)
    assert updated == manifests.read(tmp_path)
    assert updated.parts == before.parts and updated.model == before.model
