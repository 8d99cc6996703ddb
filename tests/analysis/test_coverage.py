"""Stated intervals hold what was planted, in runs whose tokens go together within sequences and documents."""

from __future__ import annotations

from types import ModuleType

REPEATS = 4  # 200 of each kind are tried by `python -m support.planted 200`: see data/log/analysis.md


def test_intervals_hold_what_was_planted(planted: ModuleType, made: ModuleType) -> None:
    """At a true coverage of 95 %, under 2 of 4 are held once in 2 000 times."""
    held = planted.coverage(made, REPEATS)
    assert len(held) == 9
    assert {name: number for name, number in held.items() if number < 2} == {}
