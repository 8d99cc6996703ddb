"""Faults of the training kernels, one line each, and whether the GPU tests catch them.

    python tests/support/training_mutants.py [-j PROCESSES] [NUMBER ...]

All faults are compiled into one library, of which a number in device memory chooses one, or none (0). A process for
each runs TESTS up to the first that fails. Prints a line for each fault: caught, by which test, or survived; the last
line counts them. Exits with 1 if one survived, or if tests fail without any.

Cost: half a minute to compile on 16 cores; some seconds for each fault, PROCESSES at a time; LIMIT for one that hangs.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.mutated_lines import MUTANTS, Mutant

from twell.kernels import build
from twell.kernels.backends import hopper_backward

LIMIT = 100  # seconds
TESTS = (
    "tests/kernels/hopper/test_training.py",
    "tests/kernels/backends/test_training_options.py",
    "tests/kernels/hopper/test_training_compact.py",
    "tests/kernels/hopper/test_training_more.py",
)
CHOSEN = "not whole and not streams and not graph and not full_size"  # one way from Python to the same launches
SWITCH = r"""
#pragma once
#include <cuda_runtime.h>
#include <vector>
static __constant__ int twell_mutant;
// What sets the number: a function of each source, which adds itself when the library is loaded.
inline std::vector<void (*)(int)>& twell_mutant_setters() {
  static std::vector<void (*)(int)> setters;
  return setters;
}
static const bool twell_mutant_added = [] {
  twell_mutant_setters().push_back([](int number) { cudaMemcpyToSymbol(twell_mutant, &number, sizeof(number)); });
  return true;
}();
extern "C" __attribute__((used, visibility("default"))) inline void twell_choose_mutant(int number) {
  for (const auto set : twell_mutant_setters()) set(number);
}
"""


def mutated(text: str, numbered: dict[int, Mutant]) -> str:
    """Return a file's text with its faults, each behind a question for its number. Raises ValueError for a line that is
    not there once."""
    places = []
    for number, mutant in numbered.items():
        if text.count(mutant.line) != 1:
            raise ValueError(
                f"mutant {number}: expected {mutant.line!r} once in {mutant.path}, {text.count(mutant.line)}"
            )
        begin = text.index(mutant.line)
        places.append((begin, begin + len(mutant.line), number, mutant))
    for begin, end, number, mutant in sorted(places, reverse=True):
        if mutant.fault is None:
            new = f"if (twell_mutant != {number}) {mutant.line}"
        else:
            new = f"(twell_mutant == {number} ? ({mutant.fault}) : ({mutant.line}))"
        text = text[:begin] + new + text[end:]
    return text.replace("#pragma once", '#pragma once\n#include "common/mutant.cuh"', 1)


def write_sources(folder: Path) -> None:
    """Copy the kernels' sources to a folder, with all faults."""
    shutil.copytree(build.CSRC, folder)
    (folder / "common/mutant.cuh").write_text(SWITCH, encoding="utf-8")
    for path in {mutant.path for mutant in MUTANTS}:
        numbered = {at: mutant for at, mutant in enumerate(MUTANTS, 1) if mutant.path == path}
        text = (build.CSRC / path).read_text(encoding="utf-8")
        (folder / path).write_text(mutated(text, numbered), encoding="utf-8")


def test_with(number: int) -> int:
    """Run the tests with a fault in this process; return pytest's exit status."""
    import pytest

    build.CSRC = Path(os.environ["TWELL_MUTATED_SOURCES"])
    for relu2 in (False, True):
        library = hopper_backward.library(relu2)
        if reason := build.failure(library):
            sys.exit(reason)
        ctypes.CDLL(str(build.build(library))).twell_choose_mutant(number)
    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-k", CHOSEN, *TESTS]))


def outcome(number: int) -> tuple[bool, str]:
    """Return whether the tests passed in a process of its own, and what to say of it."""
    began = time.monotonic()
    command = [sys.executable, __file__, "--within", str(number)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return False, f"caught or slow: no end in {LIMIT} s"
    took = time.monotonic() - began
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    by = failed[1].rsplit("/", 1)[-1] if failed else (done.stdout + done.stderr).strip()[-300:]
    passed = done.returncode == 0 and re.search(r"\d+ passed", done.stdout) is not None
    return passed, f"survived, {took:.0f} s" if passed else f"caught in {took:.0f} s by {by}"


def main() -> int:
    """Compile, run and report; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("-j", type=int, default=8)
    parser.add_argument("--within", type=int)
    arguments = parser.parse_args()
    if arguments.within is not None:
        return test_with(arguments.within)
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder) / "csrc")
        os.environ |= {"TWELL_MUTATED_SOURCES": f"{folder}/csrc", "XDG_CACHE_HOME": f"{folder}/cache"}
        build.CSRC = Path(folder) / "csrc"
        with ThreadPoolExecutor(2) as pool:
            for path in pool.map(build.build, map(hopper_backward.library, (False, True))):
                print(path.name, flush=True)
        passed, said = outcome(0)
        print(f"0, no fault: {said}", flush=True)
        if not passed:
            return 1
        numbers = arguments.numbers or range(1, len(MUTANTS) + 1)
        survived = []
        with ThreadPoolExecutor(arguments.j) as pool:
            for number, (passed, said) in zip(numbers, pool.map(outcome, numbers), strict=True):
                mutant = MUTANTS[number - 1]
                print(f"{number}, {mutant.path.rsplit('/', 1)[-1]}: {mutant.line[:60]!r}: {said}", flush=True)
                survived += [number] if passed else []
    print(f"{len(numbers)} faults, {len(survived)} survived: {survived}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
