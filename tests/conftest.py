"""What tests of several folders share."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twell.workbench.cli import SPIN
from twell.workbench.run.manifest import Manifest

if "PYTEST_XDIST_WORKER" in os.environ:  # processes share the processors already: threads of each would only wait
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="twell-state-")  # tests leave the user's own alone
os.environ.setdefault("GOMP_SPINCOUNT", SPIN)  # as on the command line; read once, by what comes with torch


DEMO_TOKENS = 50_000  # of the 160 000 that `twell demo` captures: all passages, and some of Python's own text


def made_manifest(layers: int = 3, d_ff: int = 64, **fields: Any) -> Manifest:
    """A manifest of a small made model; keywords replace its fields, `layers` and `d_ff` the model's."""
    model = {"name": "made", "revision": "", "family": "llama", "layers": layers, "d_model": 16, "d_ff": d_ff}
    given: dict[str, Any] = {
        "name": "made",
        "model": {**model, "vocab_size": 100, "parameters": 1000},
        "tokenizer": {"name": "made", "vocab_size": 100},
        "nnz_definition": "gate pre-activation > 0",
        "dtype": "float32",
        "device": "cpu",
        "driver": "",
        "kernel": {"name": "reference", "reason": "made"},
        "layout": {"tile": 256, "compression": 8, "slots": 31},
        "created": "2026-01-01T00:00:00+00:00",
    }
    return Manifest(**{**given, **fields})


def made_activity(sequences: int, length: int, layers: int = 3, first: int = 0, seed: int = 0) -> dict[str, Any]:
    """Activity rows of `sequences` sequences of `length` tokens with random counts below 64."""
    rng = np.random.default_rng(seed + first)
    n = sequences * length
    position = np.tile(np.arange(length, dtype=np.int32), sequences)
    columns: dict[str, Any] = {
        "sequence": np.repeat(np.arange(first, first + sequences, dtype=np.int32), length),
        "position": position,
        "token_id": rng.integers(0, 100, n, dtype=np.int32),
        "phase": np.zeros(n, np.uint8),
        "flags": np.where(position == 0, 2, 0).astype(np.uint8),
        "loss": np.ma.MaskedArray(rng.gamma(2, 1.5, n).astype(np.float16), mask=position == length - 1),
    }
    for layer in range(layers):
        columns[f"nnz_{layer:02d}"] = rng.integers(0, 64, n, dtype=np.uint16)
    return columns


@pytest.fixture
def make_manifest() -> Callable[..., Manifest]:
    return made_manifest


@pytest.fixture
def make_activity() -> Callable[..., dict[str, Any]]:
    return made_activity


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that `twell demo` makes, of less of its text: the bundled model over both bundled sources, captured once
    for all tests, also where several processes run them. Read it, never change it. `.ci/run` captures all of it."""
    ours = tmp_path_factory.getbasetemp()
    folder = (ours.parent if "PYTEST_XDIST_WORKER" in os.environ else ours) / "demo"
    folder.mkdir(exist_ok=True)
    out = folder / "runs" / "demo"
    code = f"from twell.workbench import cli; cli.DEMO_TOKENS = {DEMO_TOKENS}; cli.main()"
    line = [sys.executable, "-c", code, "demo", "--out", str(out), "--no-app"]
    with (folder / "captured").open("a") as note:
        fcntl.flock(note, fcntl.LOCK_EX)  # whoever comes first captures, the others wait for that
        if not os.fstat(note.fileno()).st_size:
            done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
            assert done.returncode == 0, done.stdout
            note.write("once")
    return out


# Files whose tests take long, the longest first: begun early, they do not keep one process busy after the others ended.
LONGEST = (
    "workbench/capturing/test_timing.py",
    "workbench/capturing/test_distributed.py",
    "app/test_real_runs.py",
    "app/test_live.py",
    "workbench/capturing/test_bad_input.py",
    "workbench/capturing/test_killed.py",
    "workbench/capturing/test_resume.py",
    "workbench/capturing/test_command.py",
    "app/ui/test_query.py",
    "app/test_browser.py",
    "analysis/engines/test_spark.py",
    "kernels/backends/test_compile.py",
    "workbench/training/test_folder.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests by file: the longest files first, the others as they were collected."""
    tests = Path(__file__).parent
    rank = {tests / file: at for at, file in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))
