"""The list of kernels' faults is about lines that are there; what becomes of them."""

from __future__ import annotations

import pytest
from support.kernel_mutants import MUTANTS, mutated
from support.mutants import Mutant

from twell.kernels import build


def test_every_line_stands_in_its_file_once() -> None:
    for path in {mutant.path for mutant in MUTANTS}:
        of_file = {at: mutant for at, mutant in enumerate(MUTANTS, 1) if mutant.path == path}
        text = mutated((build.CSRC / path).read_text(encoding="utf-8"), of_file)
        assert all(text.count(f"twell_mutant == {at} ") + text.count(f"twell_mutant != {at})") == 1 for at in of_file)


def test_a_fault_stands_behind_its_number() -> None:
    text = "#pragma once\nint a = b + c;\nwait();\n"
    faults = {3: Mutant("x", "b + c", "b"), 4: Mutant("x", "wait();", None)}
    assert mutated(text, faults).splitlines()[1:] == [
        '#include "common/mutant.cuh"',
        "int a = (twell_mutant == 3 ? (b) : (b + c));",
        "if (twell_mutant != 4) wait();",
    ]


@pytest.mark.parametrize("line", ["d", "b"])
def test_a_line_that_is_not_there_once_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match=f"mutant 1: expected '{line}' once in x, "):
        mutated("int a = b + b;", {1: Mutant("x", line, None)})
