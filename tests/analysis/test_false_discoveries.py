"""Of many tokens that differ between two runs by chance alone, hardly any is said to; one that does differ is."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from support.planted import classes, of_another_text, planted
from support.planted_truths import KINDS, LOUD, effects

from twell.analysis import compare_layers, compare_positions, compare_tokens
from twell.analysis.comparisons import FALSE_DISCOVERIES
from twell.workbench.run.store import Run

KIND = KINDS["documents of five, half"]


@pytest.fixture(scope="module")
def texts(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """One model on five texts, and a model on a sixth whose token LOUD fires as others do."""
    folder, effect = tmp_path_factory.mktemp("texts"), effects(np.random.default_rng(8), classes(made))
    other = np.where(np.arange(len(effect)) == LOUD, 0.0, effect)
    return [
        of_another_text(planted(made, folder / f"text-{seed}", seed, KIND, drawn)[0])
        for seed, drawn in enumerate((*[effect] * 5, other))
    ]


def left_out(table: pd.DataFrame) -> pd.Series:
    """Whether each interval leaves 0 out."""
    return (table["low"] > 0) | (table["high"] < 0)


def test_texts_of_one_model_differ_in_no_token(texts: list[Run]) -> None:
    """But in one of twenty pairs of texts in some."""
    told = []
    for other in texts[1:5]:
        table = compare_tokens([texts[0], other])
        assert not table["paired"].any() and len(table) > 150
        assert left_out(table.head(3)).all(), "by its own interval the first of so many differs"
        told.append((table["q"] <= FALSE_DISCOVERIES).sum())
    assert np.count_nonzero(told) <= 1 and sum(told) <= 2


def test_a_token_that_differs_is_told(texts: list[Run]) -> None:
    table = compare_tokens([texts[0], texts[5]]).set_index("token_id")
    assert table.loc[LOUD, "q"] < 0.001 and table.index[0] == LOUD
    assert (table["q"] <= FALSE_DISCOVERIES).sum() < left_out(table).sum()


def test_q_is_of_one_pair_of_runs(texts: list[Run]) -> None:
    for question in (compare_layers, compare_positions, compare_tokens):
        table = question(texts[:3])
        for _, rows in table.groupby("run"):
            alone = question([texts[0], next(run for run in texts[1:3] if run.name == rows["run"].iloc[0])])
            np.testing.assert_array_equal(np.sort(alone["q"]), np.sort(rows["q"]))
