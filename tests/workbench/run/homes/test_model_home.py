"""Where the model of a run lies: its folder is remembered by the checksum of its weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from twell.workbench.run.homes.model_home import model_home, recall, remember, state_folder
from twell.workbench.run.manifest import Manifest


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


def test_the_weights_come_before_the_name(
    make_manifest: Callable[..., Manifest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of the name that lies where the command is given may be another model."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for place in ("there", "here"):
        (tmp_path / place / "models" / "mine").mkdir(parents=True)
        (tmp_path / place / "models" / "mine" / "config.json").write_text("{}")
    manifest = make_manifest()
    manifest.options["model"], manifest.model["weights"] = "models/mine", "b" * 64
    assert model_home(manifest) is None
    monkeypatch.chdir(tmp_path / "here")
    assert model_home(manifest) == str(tmp_path / "here" / "models" / "mine")
    monkeypatch.chdir(tmp_path / "there")
    remember("b" * 64, "models/mine")
    monkeypatch.chdir(tmp_path / "here")
    assert model_home(manifest) == str(tmp_path / "there" / "models" / "mine")


def test_a_folder_is_recalled_while_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name on a hub is no folder. Without XDG_STATE_HOME the state is in the user's home."""
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    remember("c" * 64, "made-up/model")
    assert not state_folder().exists()
    (model := tmp_path / "model").mkdir()
    remember("c" * 64, str(model))
    assert [path.name for path in (tmp_path / ".local" / "state" / "twell" / "models").iterdir()] == ["c" * 64]
    assert recall("c" * 64) == str(model)
    model.rmdir()
    assert recall("c" * 64) is None
