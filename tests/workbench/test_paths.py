"""What is no path: one sentence from every function that takes one. Cost: 1 s."""

from __future__ import annotations

import os
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("caf\xe9".encode(), "it is, but the locale reads names as ascii; set PYTHONUTF8=1, or LC_ALL=C.UTF-8."),
        (b"caf\xe9", "rename it."),
    ],
)
def test_a_locale_that_reads_no_utf8_is_at_fault_for_a_name_that_is(name: bytes, advice: str) -> None:
    command = [sys.executable, "-m", "twell.workbench", "tokens", name]
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ascii_only, check=False)
    assert done.returncode == 2 and done.stderr.startswith("twell: Expected a name in UTF-8, got 'caf"), done.stderr
    assert done.stderr.endswith(f": {advice}\n")
