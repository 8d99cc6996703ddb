"""The Hopper kernels where all that its threads tell each other comes late, after a while that nobody knows.

A copy of its sources is compiled with random waits before each instruction on barriers, clusters and the copy engine.
Who waits there for a round that has passed already, or for one that cannot come before its own, hangs or reads what is
not there yet: without the waits that takes a delay of a microsecond at the wrong place, once in a long time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import gpu_training, sanitized, sanitized_training
from support.gpu_checks import CUDA, assert_same, skip_without

from twell.kernels import build
from twell.kernels.backends import hopper, reference

TESTS = Path(__file__).parents[2]
KERNELS = Path(build.__file__).parent
HEADER = KERNELS / "csrc" / "common" / "sm90.cuh"
DELAY = """
__device__ __forceinline__ void delay() {
  uint32_t now = clock() + threadIdx.x / 32 * 7919 + blockIdx.x * 104729 + blockIdx.y * 1299709 + blockIdx.z * 32452843;
  now = (now ^ now >> 15) * 0x2c1b3c6du, now = (now ^ now >> 12) * 0x297a2d39u, now ^= now >> 15;
  if (now % 32 == 0) __nanosleep(now >> 5 & 0x3fff);  // up to 16 microseconds
  if (now % 4096 == 1) __nanosleep(now >> 12 & 0x7ffff);  // up to half a millisecond
}
"""
HEARD = re.compile(r'asm volatile\((?!"(?:mov|setmaxnreg|wgmma))')  # instructions that others hear of


def delayed(source: str) -> str:
    """`common/sm90.cuh` with such a wait before each of its instructions that others hear of."""
    source, begun = re.subn(r"^namespace .*\n", lambda begin: begin[0] + DELAY, source, count=1, flags=re.MULTILINE)
    source, waits = HEARD.subn("delay(); asm volatile(", source)
    assert begun == 1 and waits > 30, "common/sm90.cuh does not look as it did"
    return source


def test_a_wait_stands_before_all_that_others_hear_of() -> None:
    """However it is written: asm, with or without volatile, of one line or of several."""
    heard = re.compile(r"mbarrier|cp\.async|bar\.sync|barrier\.cluster|st\.|atom|ld\.acquire|griddepcontrol")
    source = re.sub(r"//.*", "", delayed(HEADER.read_text(encoding="utf-8")))
    before, *statements = re.split(r"\basm\b", source)
    for statement in statements:
        instructions = " ".join(re.findall(r'"([^"]*)"', statement))
        assert not heard.search(instructions) or before.endswith("delay(); "), f"no wait: asm{statement[:200]}"
        before = statement
    alone = re.search(r"(?:\)|\belse)\s*delay\(\);[^;]*", source)
    assert alone is None, f"give it braces, so that the instruction stays with its wait: {alone and alone[0]}"


def copy_to(folder: Path) -> tuple[Path, dict[str, str]]:
    """Such a copy in a folder, and the environment of a process that has it."""
    kernels = folder / "twell" / "kernels"
    shutil.copytree(KERNELS, kernels, ignore=shutil.ignore_patterns("__pycache__"))
    header = kernels / HEADER.relative_to(KERNELS)
    header.write_text(delayed(header.read_text(encoding="utf-8")), encoding="utf-8")
    paths = [str(folder), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kernels, os.environ | {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(folder / "cache")}


def test_the_copy_is_what_such_a_process_has(tmp_path: Path) -> None:
    kernels, environment = copy_to(tmp_path)
    program = "from twell.kernels.backends import hopper; print(hopper.__file__)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(kernels / "backends" / "hopper.py")
    assert "delay();" in (kernels / HEADER.relative_to(KERNELS)).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    skip_without(hopper)
    return copy_to(tmp_path_factory.mktemp("delays"))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["inference", "training"])
def test_right_however_late_its_threads_are(late: tuple[Path, dict[str, str]], tmp_path: Path, name: str) -> None:
    """Calls that take every path, each several times."""
    kernels, environment = late
    program = [sys.executable, __file__, name]
    with (tmp_path / "said.txt").open("w+", encoding="utf-8") as output:  # as far as it came, should it hang
        try:
            code: object = subprocess.run(
                program, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=250
            ).returncode
        except subprocess.TimeoutExpired as error:
            code = error
        output.seek(0)
        printed = output.read()
    assert code == 0 and "all done" in printed, f"{code}\n{printed[-4000:]}"
    assert str(kernels) in printed, "it ran another copy"


def infer() -> Iterator[str]:
    """Run every call of inference three times and expect the same each time; yield what was run."""
    if reason := hopper.refuses(CUDA, torch.bfloat16, 64, 64, 1):
        sys.exit(reason)
    hopper.has_plan = lambda n, d_ff: n > 2048  # however few neurons there are
    for name, calls in sanitized.CALLS.items():
        for params in calls() if name != "cuda" else ():
            about = f"{name} {list(params.x.shape)} {len(params.w_gate)}"
            expected, counted = reference.run(params)
            first, _ = hopper.run(params)
            scale = 2**-7 * expected.abs().float().nan_to_num().amax(1, keepdim=True)  # a row's rounding
            assert bool(((first.float() - expected.float()).abs() <= scale)[counted.finite].all()), about
            if name == "added":
                first = first + sanitized.residual(params)
            for _ in range(3):
                y, stats = sanitized.run(name, params)
                assert_same(f"{about}: y", y, first)
                assert_same(f"{about}: nnz", stats.nnz, counted.nnz)
                assert_same(f"{about}: finite", stats.finite, counted.finite)
            yield about


def train() -> Iterator[str]:
    """Run every call with gradients three times, expect the dense formula's and the same bits; yield what was run."""
    if reason := sanitized_training.refuses():
        sys.exit(reason)
    for name, calls in sanitized_training.CALLS.items():
        for options in calls():
            for about, tensors in sanitized_training.arguments(name):
                expected, *wanted = gpu_training.dense(tensors)
                out, first = gpu_training.ours(tensors, **options)
                for got, want in zip((out.y, *first), (expected, *wanted), strict=True):
                    mean, _ = gpu_training.errors(*torch.atleast_2d(got, want))
                    assert mean <= 0.03, (about, list(got.shape), mean)
                for _ in range(2):
                    again, gradients = gpu_training.ours(tensors, **options)
                    assert_same(f"{about}: y", again.y, out.y)
                    for got, want in zip(gradients, first, strict=True):
                        assert_same(f"{about}: gradient of {list(want.shape)}", got, want)
                yield about


def main(name: str) -> None:
    print(KERNELS, flush=True)
    began = time.perf_counter()
    for about in {"inference": infer, "training": train}[name]():
        print(about, f"{time.perf_counter() - began:.1f} s", flush=True)
    print("all done")


if __name__ == "__main__":
    main(sys.argv[1])
