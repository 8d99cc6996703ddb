"""What a run lacks is said in words, with what to do; messages name no tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twell.workbench.errors import Missing
from twell.workbench.run.schema import TABLES
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.tables.absent import ABSENT
from twell.workbench.run.writer import RunWriter


def test_every_table_has_words_for_a_run_without_it() -> None:
    assert set(ABSENT) == set(TABLES)
    assert not any(f"{table} table" in words for table, (words, _) in ABSENT.items())


@pytest.fixture
def run_with(tmp_path: Path, make_manifest: Callable[..., Any]) -> Callable[..., Run]:
    """Return a function that makes an empty run of these fields of its manifest."""

    def make(**fields: Any) -> Run:
        RunWriter(tmp_path / "run", make_manifest(**fields)).finish(loss_sum=0.0, loss_tokens=0)
        return open_run(tmp_path / "run")

    return make


def test_the_message_says_what_to_do(run_with: Callable[..., Run]) -> None:
    run = run_with()
    with pytest.raises(
        Missing, match=r"^run holds no timings: capture with --timings above 0 \(in Python timings=\)\.$"
    ):
        run.files("timings")
    with pytest.raises(Missing, match=r"^run holds no vocabulary\.$"):
        run.files("vocab")


def test_a_count_above_a_threshold_has_nothing_to_time(run_with: Callable[..., Run]) -> None:
    """No option of the capture would time it: there is no sparse FFN."""
    run = run_with(options={"threshold": 0.01})
    with pytest.raises(Missing, match="the model runs densely") as said:
        run.files("timings")
    assert "--timings" not in str(said.value)


def test_a_table_is_missing_for_the_reason_of_its_own(run_with: Callable[..., Run]) -> None:
    """A run that keeps its rows is not called summary-only, and only the table that lost a part is called damaged."""
    lost = {"file": "timings/part-00000.parquet", "reason": "is damaged", "tokens": 0, "sequences": 0}
    run = run_with(left_out=[lost])
    for table, reasons in (("timings", [True, False]), ("fired", [False, False])):
        with pytest.raises(Missing) as said:
            run.files(table)
        assert [words in str(said.value) for words in ("without its damaged parts", "summary-only")] == reasons
