"""Faults of Hopper kernels, one line each, and whether the GPU tests catch them.

    python tests/support/kernel_mutants.py [-j PROCESSES] [NUMBER ...]

All faults are compiled into libraries, of which a number in device memory chooses one, or none (0). A process for
each runs the TESTS of its file up to the first that fails. Prints a line for each fault: caught, by which test, or
survived; the last line counts them. Exits with 1 if one survived, or if tests fail without any.

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
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import mutated_backward, mutated_forward
from support.mutants import Mutant

from twell.kernels import build
from twell.kernels.backends import hopper_backward, hopper_libraries

MUTANTS = [*mutated_backward.MUTANTS, *mutated_forward.MUTANTS]  # numbered from 1, in this order
LIMIT = 120  # seconds
HOPPER, OPTIONS = "tests/kernels/hopper", "tests/kernels/backends/test_training_options.py"
ADDED = "tests/kernels/calls/test_compiling.py"
DENSE = f"{HOPPER}/test_training_dense.py"
ONE_WAY = "not whole and not streams and not graph and not full_size"  # from Python to the same launches
# Which tests are to catch faults of a file, the first that fits: arguments of pytest.
TESTS = {
    "at_once": (
        f"{HOPPER}/test_training_compact.py",
        DENSE,
        OPTIONS,
        "-k",
        f"(once or (all and kept) or training_dense) and {ONE_WAY}",
    ),
    "keep_whole": (DENSE, "-k", ONE_WAY),
    "compact/": (
        f"{HOPPER}/test_training_compact.py",
        DENSE,
        OPTIONS,
        "-k",
        f"not worst and not repeated and {ONE_WAY}",
    ),
    "activation.cuh": (f"{HOPPER}/test_training_compact.py", OPTIONS, "-k", ONE_WAY),
    "output.cuh": (ADDED, "-k", "kernels_add"),
    "few_rows/": (
        f"{HOPPER}/test_few_rows.py",
        ADDED,
        "-k",
        "kernels_add or pairs or each_way or density or in_turns or spoils",
    ),
    "mid_rows/": (
        f"{HOPPER}/test_mid_rows.py",
        f"{HOPPER}/test_activations.py",
        ADDED,
        "-k",
        "kernels_add or narrow or edges or density or past_the_last or all_but_one or silent or shares_that_begin",
    ),
    "many_rows/": (
        f"{HOPPER}/test_down_schedule.py",
        f"{HOPPER}/test_gate.py",
        f"{HOPPER}/test_dense_tiles.py",
        ADDED,
        "-k",
        "kernels_add or tasks or weights_larger or even_tiles or even_windows or uneven_tiles or all_fires or "
        "only_the_up or odd_number or few_firings",
    ),
    "keep.cu": (
        f"{HOPPER}/test_training.py",
        f"{HOPPER}/test_training_more.py",
        f"{HOPPER}/test_training_compact.py",
        OPTIONS,
        "-k",
        f"(not compact or first_rows) and {ONE_WAY}",
    ),
    "bias_sums": (OPTIONS, "-k", f"not repeated and {ONE_WAY}"),
    "": (f"{HOPPER}/test_training.py", f"{HOPPER}/test_training_more.py", OPTIONS, "-k", f"not compact and {ONE_WAY}"),
}
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


def libraries_of(tests: str) -> list[build.Library]:
    """Return the libraries whose faults some of TESTS are to catch: of training, or of inference."""
    if tests in ("few_rows/", "mid_rows/", "many_rows/", "output.cuh"):
        return [hopper_libraries.library(relu2, False) for relu2 in (False, True)]
    return [hopper_backward.library(relu2) for relu2 in (False, True)]


def tests_of(path: str) -> str:
    """Return which of TESTS are to catch faults of a file."""
    return next(name for name in TESTS if name in path)


def test_with(number: int, tests: str) -> int:
    """Run tests with a fault in this process; return pytest's exit status."""
    import pytest

    build.CSRC = Path(os.environ["TWELL_MUTATED_SOURCES"])
    for library in libraries_of(tests):
        ctypes.CDLL(str(build.build(library))).twell_choose_mutant(number)
    return int(pytest.main(["-x", "-p", "no:cacheprovider", "--tb=line", *TESTS[tests]]))


def outcome(number: int, tests: str) -> tuple[bool, str]:
    """Return whether tests passed in a process of its own, and what to say of it."""
    began = time.monotonic()
    command = [sys.executable, __file__, "--within", tests, str(number)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return False, f"caught or slow: no end in {LIMIT} s"
    took = time.monotonic() - began
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    by = failed[1].rsplit("/", 1)[-1] if failed and number else (done.stdout + done.stderr).strip()[-1500:]
    passed = done.returncode == 0 and re.search(r"\d+ passed", done.stdout) is not None
    return passed, f"survived, {took:.0f} s" if passed else f"caught in {took:.0f} s by {by}"


def main() -> int:
    """Compile, run and report; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("-j", type=int, default=8)
    parser.add_argument("--within")
    arguments = parser.parse_args()
    if arguments.within is not None:
        return test_with(*arguments.numbers, arguments.within)
    numbers = arguments.numbers or range(1, len(MUTANTS) + 1)
    wanted = {tests_of(MUTANTS[number - 1].path): None for number in numbers}  # in order, each once
    with tempfile.TemporaryDirectory() as folder:
        write_sources(Path(folder) / "csrc")
        os.environ |= {"TWELL_MUTATED_SOURCES": f"{folder}/csrc", "XDG_CACHE_HOME": f"{folder}/cache"}
        build.CSRC = Path(folder) / "csrc"
        with ThreadPoolExecutor(2) as pool:
            for path in pool.map(build.build, [one for tests in wanted for one in libraries_of(tests)]):
                print(path.name, flush=True)
        survived = []
        with ThreadPoolExecutor(arguments.j) as pool:
            sound = list(pool.map(partial(outcome, 0), wanted))
            for name, (_, said) in zip(wanted, sound, strict=True):
                print(f"no fault, tests {name!r}: {said}", flush=True)
            if not all(passed for passed, _ in sound):
                return 1
            tests = [tests_of(MUTANTS[number - 1].path) for number in numbers]
            for number, (passed, said) in zip(numbers, pool.map(outcome, numbers, tests), strict=True):
                mutant = MUTANTS[number - 1]
                print(f"{number}, {mutant.path.rsplit('/', 1)[-1]}: {mutant.line[:60]!r}: {said}", flush=True)
                survived += [number] if passed else []
    print(f"{len(numbers)} faults, {len(survived)} survived: {survived}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
