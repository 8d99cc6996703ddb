"""What a fault is that `kernel_mutants.py` puts into a kernel."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A fault. path: under csrc/; line: an expression or statement that stands there once; fault: the expression in its
    place, or None for a statement that is left out"""

    path: str
    line: str
    fault: str | None


def faults_of(file: str, *faults: tuple[str, str | None], folder: str) -> list[Mutant]:
    """Return faults of a file. folder: where it lies; faults: a line, and what stands in its place"""
    return [Mutant(folder + file, line, fault) for line, fault in faults]
