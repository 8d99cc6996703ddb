"""The GPU kernels under compute-sanitizer: nothing out of bounds, no hazard in shared memory, no read before a write.

`make sanitize` watches the GPU tests too. What CTAs of a cluster send each other, counted by a barrier (st.async),
racecheck does not follow: it reports nothing where the wait for it is taken out. Tests of values hold that.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import sanitized, sanitized_training
from support.gpu_checks import CUDA, skip_without
from support.sanitized import CALLS

from twell.kernels import build, strongest
from twell.kernels.backends import cuda, hopper, union_counts

SAYS_CLEAN = {
    "memcheck": "ERROR SUMMARY: 0 errors",
    "initcheck": "ERROR SUMMARY: 0 errors",
    "racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
}
# What runs side by side: all calls under a tool; of racecheck, which takes seconds a call, each kind by itself.
WATCHED = {"memcheck": [*CALLS], "initcheck": [*CALLS], **{f"racecheck {name}": [name] for name in CALLS}}
TRAINING = [*sanitized_training.CALLS]
WATCHED |= {"memcheck training": TRAINING, **{f"racecheck {name}": [name] for name in TRAINING}}
OPTIONS = ["--print-limit", "10", "--show-backtrace", "device"]
Running = dict[str, tuple[subprocess.Popen[bytes], Path]]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The calls of all kernels that this GPU takes, under each tool, side by side: process and output."""
    skip_without(cuda)
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    sanitizer = shutil.which("compute-sanitizer", path=f"{home}/bin") or shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer, under CUDA_HOME or on PATH")
    for each in (union_counts, strongest):  # not in a watched process, while all others wait
        assert build.failure(each.library(torch.cuda.get_device_capability())) is None
    takes = set(CALLS) if hopper.refuses(CUDA, torch.bfloat16, 64, 64, 1) is None else {"cuda"}
    takes |= set(TRAINING) if sanitized_training.refuses() is None else set()
    alone = os.environ | {
        "PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync",  # an allocation to each tensor
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # `support` and `twell`, as here
    }
    running: Running = {}
    for watch, names in WATCHED.items():
        if calls := [name for name in names if name in takes]:
            out = tmp_path_factory.mktemp("sanitizer") / "said.txt"
            program = [sys.executable, (sanitized_training if calls[0] in TRAINING else sanitized).__file__, *calls]
            line = [sanitizer, "--tool", watch.split()[0], *OPTIONS, *program]
            with out.open("wb") as to:
                process = subprocess.Popen(line, stdout=to, stderr=subprocess.STDOUT, env=alone, start_new_session=True)
            running[watch] = process, out
    yield running
    for process, _ in running.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and what it watches
            process.wait()


@pytest.mark.gpu
@pytest.mark.parametrize("watch", WATCHED)
def test_nothing_to_report(running: Running, watch: str) -> None:
    if watch not in running:
        pytest.skip(f"calls of a kernel that does not run on this GPU: {WATCHED[watch]}")
    process, out = running[watch]
    code, printed = process.wait(timeout=280), out.read_text(errors="replace")
    assert code == 0 and "all done" in printed and SAYS_CLEAN[watch.split()[0]] in printed, printed[-8000:]
