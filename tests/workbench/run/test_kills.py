"""Some cases of the fuzzer of kills: summaries and exports that are cut short are never read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def test_summaries_and_exports_that_are_cut_short() -> None:
    """In a process of its own, which forks before it has run threads; six cases, each in one of six ways."""
    line = [sys.executable, "-m", "support.fuzz", "kills", "--cases", "6"]
    tests = Path(__file__).parents[2]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(line, capture_output=True, text=True, env=found, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| FAILED | 0 |" in done.stdout
