"""Tables that several questions share: taken once while they are asked together, and never mixed up."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from support.rewritten import forget_checksums

from twell.analysis import by_layer, findings, overview
from twell.analysis.memo import memo_scope, memoized
from twell.analysis.summaries import read
from twell.workbench.errors import Missing
from twell.workbench.run.checks import verified
from twell.workbench.run.store import Run


@pytest.fixture
def asked() -> tuple[list[Any], Callable[..., pd.DataFrame]]:
    """A memoized function, and what it was called with."""
    calls: list[Any] = []

    @memoized
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
    with memo_scope():
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
    calls.clear()
    with memo_scope():
        table(run)
        with memo_scope():
            table(run)
        table(run)
    assert len(calls) == 1, "a block within another shares what that one holds"


@pytest.mark.parametrize(("question", "twice"), [(findings, 1), (overview, 0)])
def test_answers_are_those_of_each_table_by_itself(
    run: Run, monkeypatch: pytest.MonkeyPatch, question: Callable[[Run], Any], twice: int
) -> None:
    """Sharing changes no answer, and the tables that questions share are read once."""
    question(run)
    time.sleep(2e-9 * verified.TICK)  # what was checked of a file that is this new is not held
    answer, opened = question(run), []
    monkeypatch.setattr(read, "_decoded", read._decoded.__wrapped__)  # which keeps what was read before

    class Noted(pq.ParquetFile):
        def __init__(self, path: Any, **given: Any) -> None:
            opened.append(Path(path).name)
            super().__init__(path, **given)

    monkeypatch.setattr(pq, "ParquetFile", Noted)
    question(run)
    assert {"layers.parquet", "position_bands.parquet", "token_scores.parquet"} <= set(opened)
    together_reads = len(opened)
    assert together_reads == len(set(opened)) + twice, "each once, but for the classes of token_scores"
    monkeypatch.setitem(question.__globals__, "memo_scope", nullcontext)
    again = question(run)
    assert again.equals(answer) if isinstance(again, pd.DataFrame) else again == answer
    assert len(opened) > 1.5 * together_reads


def test_decoded_columns_are_those_of_the_file_as_it_is(small: Run) -> None:
    """They are kept until the file is another, and nobody can change them for the next who asks."""
    names = ("layer", "nnz", "tokens")
    summaries = read.open_summaries(small)
    first = summaries.columns("layers", *names)
    assert all(summaries.columns("layers", *names)[name] is first[name] for name in names)
    for values in first.values():
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 7
    before, rows = by_layer(small), pd.read_parquet(small.summary_path("layers"))
    rows.assign(nnz=rows["nnz"] + 1).to_parquet(small.summary_path("layers"))
    forget_checksums(small)
    np.testing.assert_allclose(by_layer(small)["mean"], before["mean"] + 1)
