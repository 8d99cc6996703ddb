"""Tables that several questions share: taken once while they are asked together, and never mixed up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest

from twell.analysis import findings
from twell.analysis.shared import shared, together
from twell.workbench.errors import Missing
from twell.workbench.store import Run


@pytest.fixture
def asked() -> tuple[list[Any], Callable[..., pd.DataFrame]]:
    """A shared function, and what it was called with."""
    calls: list[Any] = []

    @shared
    def table(run: Run, number: int = 0) -> pd.DataFrame:
        calls.append((run.name, number))
        if number < 0:
            raise Missing("No such number.")
        return pd.DataFrame({"a": [number]})

    return calls, table


def test_once_a_block(run: Run, bos_run: Run, asked: Any) -> None:
    calls, table = asked
    table(run)
    table(run)
    assert len(calls) == 2, "nothing is held outside of a block"
    calls.clear()
    with together():
        first = table(run)
        first["b"] = 1
        assert list(table(run)) == ["a"], "what a caller adds is its own"
        assert [table(run, 3)["a"][0], table(run, number=3)["a"][0], table(bos_run)["a"][0]] == [3, 3, 0]
        for _ in range(2):
            with pytest.raises(Missing):
                table(run, -1)
    assert calls[:4] == [(run.name, 0), (run.name, 3), (run.name, 3), (bos_run.name, 0)]
    table(run)
    assert len(calls) == 7


def test_findings_are_those_of_each_table_by_itself(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharing changes no answer, and the tables that claims share are read once."""
    found, read = findings(run), []

    class Noted(pq.ParquetFile):
        def __init__(self, path: Any, **given: Any) -> None:
            read.append(Path(path).name)
            super().__init__(path, **given)

    monkeypatch.setattr(pq, "ParquetFile", Noted)
    findings(run)
    assert {"layers.parquet", "positions.parquet", "token_scores.parquet"} <= set(read)
    together_reads = len(read)
    assert together_reads == len(set(read)) + 1, "each once, but for two choices of the columns of token_scores"
    monkeypatch.setitem(findings.__globals__, "together", nullcontext)
    pd.testing.assert_frame_equal(findings(run), found)
    assert len(read) > 2 * together_reads
