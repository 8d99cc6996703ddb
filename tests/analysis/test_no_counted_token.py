"""Runs in which no token is counted: a sentence for every question, and no number made of none. Cost: 5 s."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import synthetic_runs

from twell import analysis
from twell.workbench.errors import Missing
from twell.workbench.run.schema import FLAG_FIRST, FLAG_NOT_FINITE, nnz_columns
from twell.workbench.run.store import Run

LAYERS = 3
SENTENCES = {
    FLAG_NOT_FINITE: "an FFN had values that are not finite",
    FLAG_FIRST: "is special or the first of its sequence",
}


def flagged_as(flag: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A change of a run's columns: every token has a flag, and those that are not finite fired nothing."""

    def change(columns: dict[str, Any]) -> dict[str, Any]:
        columns = columns | {"flags": np.full_like(columns["flags"], flag)}
        if flag == FLAG_NOT_FINITE:
            columns |= {name: np.zeros_like(columns[name]) for name in nnz_columns(LAYERS)}
        return columns

    return change


def flat(rows: dict[str, Any]) -> dict[str, Any]:
    """Timings of rows that fired nothing."""
    return rows | {"nnz_mean": np.zeros_like(rows["nnz_mean"])}


@pytest.fixture(params=SENTENCES, ids=["not_finite", "first"])
def uncounted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Run, str]:
    """A run without a token to count, and what is said of it."""
    flag = request.param
    timings = flat if flag == FLAG_NOT_FINITE else None
    shape = {"layers": LAYERS, "sequences": 20}
    run = synthetic_runs.make(tmp_path / "run", change=flagged_as(flag), change_timings=timings, **shape)
    return run, SENTENCES[flag]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("question", ["by_layer", "layer_histogram", "token_classes", "by_token", "by_neuron"])
def test_a_question_is_refused_with_the_reason(question: str, uncounted: tuple[Run, str]) -> None:
    run, sentence = uncounted
    with pytest.raises(Missing) as refused:
        getattr(analysis, question)(run)
    assert sentence in str(refused.value)
    assert f" {run.manifest.tokens:,} tokens" in str(refused.value)


def test_the_overview_has_no_sparsity_but_the_reason(uncounted: tuple[Run, str]) -> None:
    run, sentence = uncounted
    result = analysis.overview(run)
    for name in ("tokens", "sparsity", "nnz_mean", "densest_nnz", "dead_share"):
        assert result[name] is None
        assert sentence in result["missing"][name]


def test_rows_that_are_not_finite_are_no_zeros(tmp_path: Path) -> None:
    """With flagged=True a run of first tokens has its counts; one of NaN has none, and no speedup."""
    runs = {
        flag: synthetic_runs.make(
            tmp_path / str(flag), change=flagged_as(flag), change_timings=flat, layers=LAYERS, sequences=20
        )
        for flag in SENTENCES
    }
    assert (analysis.by_layer(runs[FLAG_FIRST], flagged=True)["mean"] > 0).all()
    for ask in (
        lambda run: analysis.by_layer(run, flagged=True),
        lambda run: analysis.by_position(run, flagged=True),
        analysis.speedup,
    ):
        with pytest.raises(Missing, match="not finite"):
            ask(runs[FLAG_NOT_FINITE])
