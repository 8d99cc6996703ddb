"""What is no path: one sentence from every function that takes one. Cost: under 1 s."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from twell.workbench import TwellCallback, capture, load_pruned, open_run, study, watch
from twell.workbench.errors import UserError
from twell.workbench.run.store import list_runs

OUT = "a folder for out="
TAKE_A_PATH: dict[str, tuple[Callable[[Any], Any], str]] = {
    "open_run": (open_run, "the folder of a run"),
    "list_runs": (list_runs, "a folder of runs"),
    "load_pruned": (load_pruned, "the folder of a pruned model"),
    "save": (lambda path: watch(nn.Linear(1, 1)).save(path), "a folder to save the run in"),
    "watch": (lambda path: watch(nn.Linear(1, 1), out=path), OUT),
    "callback": (lambda path: TwellCallback(out=path), OUT),
    "capture": (lambda path: capture("builtin:demo", ["a text"], out=path), OUT),
    "capture a model": (lambda path: capture(path, ["a text"]), "a model, or its folder or hub id"),
    "study a model": (lambda path: study(path, ["a text"]), "a model, or its folder or hub id"),
}


@pytest.mark.parametrize("name", TAKE_A_PATH)
def test_what_is_no_path_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty string is not the folder that the process runs in; `out=None` is a default."""
    monkeypatch.chdir(tmp_path)
    call, wanted = TAKE_A_PATH[name]
    for given in (3, "", b"runs", [], *([None] if wanted != OUT else [])):
        with pytest.raises(UserError) as error:
            call(given)
        assert str(error.value) == f"Expected {wanted}, got {given!r}: give its path, as 'runs/mine'."
    assert not list(tmp_path.iterdir())
