"""Some cases of the fuzzers of kills: what is cut short is never read, and a full disk is one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("subject", "cases"), [("kills", 8), ("model_kills", 3)])
def test_what_is_cut_short(subject: str, cases: int) -> None:
    """In a process of its own, which forks before it has run threads; each case in another way.

    kills: summaries and exports; model_kills: training, watching and captures
    """
    line = [sys.executable, "-m", "support.fuzz", subject, "--cases", str(cases)]
    tests = Path(__file__).parents[2]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(line, capture_output=True, text=True, env=found, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| FAILED | 0 |" in done.stdout
