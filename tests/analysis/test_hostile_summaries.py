"""Summaries with numbers that the run cannot have: one sentence, before memory is taken for them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from support.rewritten import forget_checksums

import twell.analysis as analysis
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run

HUGE = 2**31 - 1
CASES: list[tuple[str, str, int, Callable[[Run], object]]] = [
    ("layers", "layer", HUGE, analysis.by_layer),
    ("layers", "layer", -2, analysis.by_layer),
    ("layers", "nnz", HUGE, analysis.layer_histogram),
    ("positions", "layer", HUGE, analysis.by_position),
    ("positions", "position", HUGE, analysis.by_position),
    ("position_bands", "layer", HUGE, analysis.position_fit),
    ("position_bands", "replicate", HUGE, analysis.position_fit),
    ("position_bands", "band", HUGE, analysis.position_fit),
    ("tokens", "token_id", HUGE, lambda run: analysis.by_token(run, min_count=1)),
    ("token_layers", "layer", HUGE, lambda run: analysis.token_profile(run, 40)),
    ("surprisal", "loss_bin", HUGE, analysis.surprisal),
    ("surprisal_classes", "nnz_class", HUGE, lambda run: analysis.surprisal(run, of="own")),
    ("neurons", "neuron", HUGE, analysis.by_neuron),
    ("neurons", "layer", HUGE, analysis.by_neuron),
    ("tiles", "occupancy", HUGE, analysis.tile_audit),
    ("unions", "neurons", HUGE, analysis.layer_gains),
]


@pytest.fixture
def copy(small_copy: Run) -> Run:
    return forget_checksums(small_copy)


@pytest.mark.parametrize(("name", "column", "value", "question"), CASES, ids=lambda part: str(part)[:16])
def test_a_key_that_the_run_cannot_have(
    copy: Run, name: str, column: str, value: int, question: Callable[[Run], object]
) -> None:
    path = copy.summary_path(name)
    rows = pd.read_parquet(path)
    rows.loc[rows.index[-1], column] = value
    rows.to_parquet(path)
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=rf"^Expected .*{name}\.parquet, got one that has {value} in {column}.*\.$"):
            question(copy)
        assert tracemalloc.get_traced_memory()[1] < 2**26
    finally:
        tracemalloc.stop()


def test_positions_without_tokens(copy: Run) -> None:
    """The fit ends, with a sentence."""
    path = copy.summary_path("positions")
    rows = pd.read_parquet(path)
    for change in (rows.iloc[:0], rows.assign(tokens=0, nnz_sum=0, nnz_square=0)):
        change.to_parquet(path)
        with pytest.raises(UserError, match=r"^Expected .*tokens.*\.$"):
            analysis.position_fit(copy)


def test_summaries_behind_a_link(small: Run, tmp_path: Path) -> None:
    """Nothing is written to where the link leads."""
    (tmp_path / "mine").mkdir()
    (small.path / "summary").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"^Expected .*summary.*, got a link.*\.$"):
        analysis.by_layer(small)
    assert not list((tmp_path / "mine").iterdir())
