"""The GPU kernels under compute-sanitizer: nothing out of bounds, no hazard in shared memory, no read before a write.

Of one kernel racecheck sees but a part. In `mid_down` threads copy into memory (cp.async) that other CTAs of the
cluster write later. Each waits for its copies, then for the cluster's barrier: the tool follows that where ordinary
stores or the copy engine wrote, and for such copies never, whatever else stands between. So that kernel is watched
where it does not do both (by leaving out others: watched alone it fails in the tool itself).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gpu_checks import CUDA, skip_without
from sanitized import CALLS

from twell.kernels import cuda, hopper

CLEAN, NO_HAZARDS = "ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"
WATCHES: dict[str, tuple[str, list[str], set[str]]] = {  # what a clean run says; options; of what calls
    "memcheck": (CLEAN, ["--tool", "memcheck"], set(CALLS)),
    "initcheck": (CLEAN, ["--tool", "initcheck"], set(CALLS)),
    "racecheck": (
        NO_HAZARDS,
        ["--tool", "racecheck", "--kernel-name-exclude", "kns=mid_down"],
        {"few", "middle", "tiles", "many", "whole", "cuda"},
    ),
    "racecheck of mid_down": (NO_HAZARDS, ["--tool", "racecheck"], {"down"}),
}
SAYS = ["--print-limit", "10", "--show-backtrace", "device"]
Watched = tuple[subprocess.Popen[bytes], Path]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Watched]]:
    """The calls of all kernels that this GPU takes, as each watch has it, side by side: process and output."""
    skip_without(cuda)
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    sanitizer = shutil.which("compute-sanitizer", path=f"{home}/bin") or shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer, under CUDA_HOME or on PATH")
    takes = set(CALLS) if hopper.refuses(CUDA, torch.bfloat16, 64, 64, 1) is None else {"cuda"}
    alone = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # an allocation to each tensor
    program = [sys.executable, str(Path(__file__).with_name("sanitized.py"))]
    running: dict[str, Watched] = {}
    for watch, (_, options, names) in WATCHES.items():
        if not names & takes:
            continue
        out = tmp_path_factory.mktemp("sanitizer") / "said.txt"
        line = [sanitizer, *options, *SAYS, *program, *sorted(names & takes)]
        with out.open("wb") as to:
            running[watch] = subprocess.Popen(line, stdout=to, stderr=subprocess.STDOUT, env=alone), out
    yield running
    for process, _ in running.values():
        process.kill()
        process.wait()


@pytest.mark.gpu
@pytest.mark.parametrize("watch", WATCHES)
def test_nothing_to_report(watched: dict[str, Watched], watch: str) -> None:
    if watch not in watched:
        pytest.skip("no kernel here that this watch is of")
    process, out = watched[watch]
    code, said = process.wait(timeout=280), out.read_text(errors="replace")
    assert code == 0 and "all done" in said and WATCHES[watch][0] in said, said[-8000:]
