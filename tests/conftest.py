"""What tests of several folders share."""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import processes  # before what counts processors as it is imported

from twell.workbench import cli
from twell.workbench.options import DemoOptions
from twell.workbench.run.manifest import Manifest

pytest_plugins = ["support.processes", "support.browsers"]
STATE = tempfile.TemporaryDirectory(prefix="twell-state-")  # tests leave the user's own alone; removed as Python ends
os.environ["XDG_STATE_HOME"] = STATE.name
os.environ.setdefault("GOMP_SPINCOUNT", cli.SPIN)  # as on the command line; read once, by what comes with torch
gc.disable()  # until all is imported: what is imported stays


DEMO_TOKENS = 30_000  # of the 160 000 that `twell demo` captures: all passages, and some of Python's own text


def made_manifest(layers: int = 3, d_ff: int = 64, **fields: Any) -> Manifest:
    """Return the manifest of a small synthetic model; keywords replace its fields."""
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
    """Return activity columns of `sequences` sequences of `length` tokens, with random counts below 64."""
    import numpy as np

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
        "entropy": np.ma.MaskedArray(np.linspace(0, 4, n, dtype=np.float32), mask=position == length - 1),
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
    """Capture what `twell demo` does, of less of its text, once for all tests and test processes; return the run.

    Tests read the run and never change it. `.ci/run` captures all of the text, by the command.
    """
    ours = tmp_path_factory.getbasetemp()
    folder = (ours.parent if processes.OWN in os.environ else ours) / "demo"
    folder.mkdir(exist_ok=True)
    out = folder / "runs" / "demo"
    with (folder / "captured").open("a") as note, pytest.MonkeyPatch.context() as changed:
        fcntl.flock(note, fcntl.LOCK_EX)  # whoever comes first captures, the others wait for that
        if not os.fstat(note.fileno()).st_size:
            changed.setattr(cli, "DEMO_TOKENS", DEMO_TOKENS)
            cli.demo(DemoOptions(out=out, app=False))
            note.write("once")
    return out


# Files whose tests take long, the longest first: begun early, they do not keep one process busy after the others ended.
# Files of a row run in one process, one after another: they share a browser and a server, or what processes fork from.
LONGEST = (
    ("workbench/capturing/test_timing.py",),
    (
        "app/test_browser.py",
        "app/test_live.py",
        "app/test_quick.py",
        "app/test_more_pages.py",
        "app/test_ways.py",
        "app/runs/test_export_page.py",
        "app/server/test_preload.py",
        "app/server/test_guard.py",
        "app/server/test_pictures.py",
        "app/server/test_links.py",
    ),
    ("app/test_twelve_questions.py",),
    (
        "app/test_real_runs.py",
        "app/speed/test_kernels.py",
        "app/jobs/test_own_text.py",
    ),
    (
        "workbench/capturing/test_distributed.py",
        "workbench/capturing/test_killed.py",
        "workbench/training/test_folder.py",
        "workbench/training/test_ranks.py",
        "workbench/run/test_kills.py",
        "kernels/test_training_ranks.py",
    ),
    ("analysis/engines/test_spark.py",),
    ("kernels/backends/test_compile.py",),
    ("app/ui/test_query.py",),
    ("workbench/capturing/test_resume.py",),
    ("app/jobs/test_worker.py",),
    ("kernels/backends/test_cpu.py",),
    ("workbench/models/test_families.py",),
    ("workbench/watching/test_watch.py",),
    ("test_gallery.py",),
    ("analysis/claims/test_findings.py",),
    ("analysis/exports/test_document.py",),
    ("analysis/test_damaged_runs.py",),
    ("workbench/capturing/test_command.py",),
)
TESTS = Path(__file__).parent
RANK = {TESTS / file: (row, at) for row, files in enumerate(LONGEST) for at, file in enumerate(files)}


@pytest.hookimpl(trylast=True)  # after tests were chosen by name and mark
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the tests by file: the longest files first, the others as they were collected. Without a GPU, leave one
    case of each test that needs one, which says so."""
    assert all(path.exists() for path in RANK), "a file of LONGEST has moved"
    assert len(RANK) == sum(map(len, LONGEST)), "a file stands in LONGEST twice"
    items.sort(key=lambda item: RANK.get(item.path, (len(LONGEST), 0)))
    for item in items:
        if item.path in RANK:
            item.stash[processes.ROW], _ = RANK[item.path]
    if further := further_cases(items):
        items[:] = [item for item in items if item not in further]
        config.hook.pytest_deselected(items=list(further))


def further_cases(items: list[pytest.Item]) -> dict[pytest.Item, None]:
    """Return all cases but the first of each test that needs a GPU, where there is none; no case where there is one."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("gpu"):
            cases.setdefault(item.nodeid.split("[")[0], []).append(item)
    if not cases or importlib.import_module("torch").cuda.is_available():
        return {}
    return dict.fromkeys(case for of_test in cases.values() for case in of_test[1:])


def pytest_collection_finish() -> None:
    """Leave what is imported out of later collections of garbage, and collect less often."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    gc.enable()
