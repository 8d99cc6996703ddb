"""The greatest losses, and their quantiles, are those that DuckDB finds among all rows, and no row is held by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

from twell.analysis.tokens import highest
from twell.analysis.tokens.highest import MOST_LOSS, SEEN, loss_quantiles, most_surprising
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

Columns = dict[str, Any]
SHARES = [0.01, 0.99]


def as_drawn(columns: Columns) -> Columns:
    return columns


def alike(columns: Columns) -> Columns:
    """More losses than are listed are the greatest."""
    columns["loss"][::9] = np.float16(30)
    return columns


def generated(columns: Columns) -> Columns:
    return columns | {"phase": (columns["position"] >= 20).astype(np.uint8)}


def out_of_order(columns: Columns) -> Columns:
    order = np.random.default_rng(4).permutation(len(columns["token_id"]))
    return {name: values[order] for name, values in columns.items()}


@pytest.fixture(params=[as_drawn, alike, generated, out_of_order])
def changed(request: pytest.FixtureRequest, made: ModuleType, tmp_path: Path) -> Run:
    change: Callable[[Columns], Columns] = request.param
    return made.make(tmp_path / "run", layers=2, sequences=60, change=change)


@pytest.fixture
def no_queries(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function from whose call on no query is answered."""

    def refused(*_: Any) -> None:
        raise AssertionError("expected no query over all rows")

    return lambda: monkeypatch.setattr(Run, "sql", refused)


@pytest.mark.parametrize("phase", [None, 0, 1])
def test_the_most_surprising_places(changed: Run, no_queries: Callable[[], None], phase: int | None) -> None:
    of_phase = "" if phase is None else f"where phase = {phase} "
    expected = changed.sql(
        "select sequence, position + 1 as position, cast(loss as double) as value from activity "
        f"join (select sequence, min(position) as start, max(position) as final from activity {of_phase}"
        "group by sequence) using (sequence) where loss < 1e4 and position + 1 between start and final "
        f"order by value desc, sequence, position limit {4 * SEEN}"
    )
    no_queries()
    pd.testing.assert_frame_equal(most_surprising(changed, phase), expected, check_dtype=False)


def test_quantiles_of_losses(changed: Run, no_queries: Callable[[], None]) -> None:
    query = f"select quantile_cont(cast(loss as double), {SHARES}) as q from activity where loss < 1e4"
    expected = changed.sql(query)["q"][0].tolist()
    no_queries()
    assert loss_quantiles(changed, SHARES) == expected


def test_losses_that_no_model_has_have_no_quantiles(made: ModuleType, tmp_path: Path) -> None:
    def change(columns: Columns) -> Columns:
        return columns | {"loss": np.ma.masked_array(columns["loss"] * 0 + 2 * MOST_LOSS, columns["loss"].mask)}

    run = made.make(tmp_path / "run", change=change, layers=2, sequences=6)
    with pytest.raises(Missing, match="run has no loss under 10,000 nats, so that surprisal has no scale"):
        loss_quantiles(run, SHARES)


def test_summaries_that_are_replaced_as_they_are_read_are_not_used(
    made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a run that is being recorded: they may be of more parts than the run was opened with."""
    run = made.make(tmp_path / "run", layers=2, sequences=20)
    expected = highest.fullest_tokens(run, 0)

    class Newer:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def frame(self, *_: Any, **__: Any) -> pd.DataFrame:
            return pd.DataFrame({"sequence": [99], "position": [1], "token_id": [1], "phase": [0], "nnz": [10**6]})

    states = iter([True, False])
    monkeypatch.setattr(highest, "Summaries", Newer)
    monkeypatch.setattr(highest, "_summarised", lambda _: next(states))
    pd.testing.assert_frame_equal(highest.fullest_tokens(run, 0), expected, check_dtype=False)
