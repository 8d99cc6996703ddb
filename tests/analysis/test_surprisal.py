"""Surprisal against numpy on the rows, and the planted relation."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from twell.analysis import surprisal, surprisal_correlation
from twell.workbench.errors import Missing, UserError
from twell.workbench.store import Run


@pytest.fixture(scope="module")
def predicted(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["flags"] == 0) & rows["loss"].notna()]


def jackknife(groups: pd.Series, statistic, rows: pd.DataFrame) -> float:
    whole, labels = statistic(rows), sorted(set(groups))
    without = [statistic(rows[groups.loc[rows.index] != label]) for label in labels]
    r = len(labels)
    return float(np.sqrt((r - 1) / r * np.sum((np.array(without) - whole) ** 2)))


@pytest.mark.parametrize("bins", [1, 7, 20])
def test_curve(run: Run, predicted: pd.DataFrame, bins: int) -> None:
    table = surprisal(run, bins=bins)
    assert table["tokens"].sum() == len(predicted) * run.layers
    assert (table.groupby("layer")["bin"].count() <= bins).all()
    groups = predicted["sequence"] % 20
    for row in table.itertuples():
        inside = (predicted["loss"] >= row.loss_low) & (predicted["loss"] < row.loss_high)
        assert row.tokens == inside.sum()
        there = predicted[inside]
        assert row.nnz_mean == pytest.approx(there[row.layer].mean(), rel=1e-9)
        if row.layer == 0:
            layer = row.layer
            error = jackknife(groups, lambda rows, layer=layer: rows[layer].mean(), there)
            assert row.nnz_se == pytest.approx(error, rel=1e-9)


def test_bins_are_about_equal_and_follow_each_other(run: Run) -> None:
    table = surprisal(run, bins=10)
    layer = table[table["layer"] == 1]
    assert (layer["loss_low"].to_numpy()[1:] >= layer["loss_high"].to_numpy()[:-1]).all()
    assert layer["tokens"].max() < 2 * layer["tokens"].min()


def test_correlation(run: Run, predicted: pd.DataFrame) -> None:
    table = surprisal_correlation(run)
    assert (table["n"] == len(predicted)).all()
    loss = np.floor(np.sqrt(predicted["loss"]) * 6)
    groups = predicted["sequence"] % 20
    half = stats.t.ppf(0.975, 19)
    for row in table.itertuples():
        nnz = predicted[row.layer]
        classes = nnz.where(nnz < 8, np.floor(np.sqrt(8 * nnz)))
        both = pd.DataFrame({"loss": loss, "nnz": classes})
        assert row.spearman == pytest.approx(stats.spearmanr(both).statistic, rel=1e-9)
        error = jackknife(groups, lambda rows: np.arctanh(stats.spearmanr(rows).statistic), both)
        z = np.arctanh(row.spearman)
        assert row.low == pytest.approx(np.tanh(z - half * error), rel=1e-9)
        assert row.high == pytest.approx(np.tanh(z + half * error), rel=1e-9)


def test_classes_lose_next_to_nothing(run: Run, predicted: pd.DataFrame) -> None:
    table = surprisal_correlation(run)
    for row in table.itertuples():
        untied = stats.spearmanr(predicted["loss"], predicted[row.layer]).statistic
        assert row.spearman == pytest.approx(untied, abs=0.003)


def test_planted_relation_is_there(run: Run) -> None:
    assert (surprisal_correlation(run)["low"] > 0).all()


def test_without_loss(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "no-loss", loss=False, sequences=10, parts=1)
    for question in (surprisal, surprisal_correlation):
        with pytest.raises(Missing, match="--no-loss"):
            question(run)


def test_fewer_sequences_than_groups(made: ModuleType, tmp_path: Path) -> None:
    def spread(columns: dict[str, Any]) -> dict[str, Any]:
        return {**columns, "sequence": columns["sequence"] * 2}

    run = made.make(tmp_path / "seven", sequences=7, parts=1, layers=1, change=spread)
    rows = run.activity(flagged=False).dropna(subset="loss")
    error = jackknife(rows["sequence"], lambda rows: rows["nnz_00"].mean(), rows)
    table = surprisal(run, bins=1)
    assert table["nnz_se"].item() == pytest.approx(error, rel=1e-9)
    assert "from 7 groups" in table.attrs["note"]


def test_one_sequence_has_no_interval(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "one", sequences=1, parts=1, layers=1)
    table = surprisal_correlation(run)
    assert table["spearman"].notna().all()
    assert table["low"].isna().all()
    assert surprisal(run)["nnz_se"].isna().all()


def test_impossible_bins(run: Run) -> None:
    with pytest.raises(UserError, match="at least 1 bin"):
        surprisal(run, bins=0)
