"""Some cases of the fuzzers of kills: what is cut short is never read, and a full disk is one sentence."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.forked import start


def fuzz(words: list[str], printed: Path) -> None:
    """Run the command line of the fuzzers, and end with its exit code; what it prints goes to a file."""
    from support.fuzz.__main__ import main

    with printed.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["support.fuzz", *words]
    sys.exit(main())


@pytest.mark.parametrize(("subject", "cases"), [("kills", 8), ("model_kills", 3)])
def test_what_is_cut_short(subject: str, cases: int, tmp_path: Path) -> None:
    """In a process of its own, which forks before it has run threads; each case in another way.

    kills: summaries and exports; model_kills: training, watching and captures
    """
    process = start(fuzz, [subject, "--cases", str(cases)], tmp_path / "printed.txt")
    process.join(280)
    printed = (tmp_path / "printed.txt").read_text(encoding="utf-8")
    assert process.exitcode == 0, printed
    assert "| FAILED | 0 |" in printed
