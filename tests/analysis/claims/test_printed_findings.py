"""Findings as Markdown, of several runs side by side, and from the command line."""

from __future__ import annotations

import runpy
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest

from twell.analysis import ensure, findings
from twell.analysis.claims import across
from twell.analysis.claims import findings as module
from twell.analysis.claims.beyond import BEYOND
from twell.analysis.claims.claim import UNTOLD, between
from twell.analysis.claims.findings import markdown, side_by_side
from twell.workbench.run.store import Run


def test_markdown(run: Run) -> None:
    table = findings(run)
    lines = markdown(run).splitlines()
    assert len(lines) == 2 + len(table) - len(BEYOND) - len(across.CLAIMS)
    assert len(markdown(run, beyond=True).splitlines()) == 2 + len(table)
    assert all(line.count("|") == 6 for line in lines)


def test_side_by_side(run: Run, bos_run: Run) -> None:
    lines = side_by_side([run, bos_run]).splitlines()
    tables = [findings(one).set_index("claim") for one in (run, bos_run)]
    settled = [claim for claim in tables[0].index if any(table["verdict"][claim] != UNTOLD for table in tables)]
    assert len(lines) == 2 + len(settled)
    for claim, line in zip(settled, lines[2:], strict=True):
        cells = line.strip("| ").split(" | ")
        assert cells[0] == claim
        assert [cell.split("**")[1] for cell in cells[1:]] == [table["verdict"][claim] for table in tables]


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (1.2836, 1.3, "1.28 to 1.30"),
        (811.6, 1112.4, "812 to 1,112"),
        (0.004, 1.2, "0.004 to 1.200"),
        (-0.0651, -0.032, "-0.0651 to -0.0320"),
        (2e-5, 0.31, "2e-05 to 0.31"),
        (float("nan"), float("nan"), "not known"),
    ],
)
def test_intervals_have_as_many_decimals_at_both_ends(low: float, high: float, said: str) -> None:
    assert between(low, high) == said


def test_from_the_command_line(run: Run, bos_run: Run) -> None:
    """Side by side, and nothing else said: no warning, no progress."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "twell.analysis"]
    ensure(run)
    ensure(bos_run)
    completed = subprocess.run([*command, str(run.path), str(bos_run.path)], capture_output=True, text=True)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout == side_by_side([run, bos_run]) + "\n"


def test_the_command_line_without_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["twell.analysis", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("twell.analysis", run_name="__main__")
    assert not ended.value.code and capsys.readouterr().out.startswith("python -m twell.analysis RUN …: ")
    monkeypatch.setattr(sys, "argv", ["twell.analysis"])
    with pytest.raises(SystemExit, match=r"^Expected one run or more: python -m twell\.analysis RUN …$"):
        runpy.run_module("twell.analysis", run_name="__main__")


def test_each_column_of_runs_side_by_side_is_of_a_run_and_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claims between models need the others; and each run comes first in its own column."""
    asked: list[str] = []

    def answered(*runs: Any) -> pd.DataFrame:
        asked.append("".join(run.name for run in runs))
        return pd.DataFrame([{"claim": "c", "this_run": f"says {asked[-1]}", "reason": "", "verdict": "holds"}])

    monkeypatch.setattr(module, "findings", answered)
    table = side_by_side([cast(Run, SimpleNamespace(name=name)) for name in "abc"])
    assert asked == ["abc", "bac", "cab"]
    assert table.splitlines()[-1] == "| c | **holds**: says abc | **holds**: says bac | **holds**: says cab |"
