"""Surprisal against numpy on the rows, and the planted relation."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.clusters import correlation_interval, kept
from support.questions import degrees

from twell.analysis import ensure, surprisal, surprisal_correlation
from twell.analysis.summaries import derived, rank_tables
from twell.analysis.summaries.token_class import classify
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run


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
    groups = predicted["document"] % 20
    for row in table.itertuples():
        inside = (predicted["loss"] >= row.loss_low) & (predicted["loss"] < row.loss_high)
        assert row.tokens == inside.sum()
        there = predicted[inside]
        assert row.nnz_mean == pytest.approx(there[row.layer].mean(), rel=1e-9)
        if row.layer == 0:
            layer = row.layer
            error = jackknife(groups, lambda rows, layer=layer: rows[layer].mean(), there)
            assert row.nnz_se == pytest.approx(error, rel=1e-9)
            half = stats.t.ppf(0.975, degrees(groups[inside])) * error
            assert (row.low, row.high) == pytest.approx((row.nnz_mean - half, row.nnz_mean + half), rel=1e-9)


def test_bins_are_about_equal_and_follow_each_other(run: Run) -> None:
    table = surprisal(run, bins=10)
    layer = table[table["layer"] == 1]
    assert (layer["loss_low"].to_numpy()[1:] >= layer["loss_high"].to_numpy()[:-1]).all()
    assert layer["tokens"].max() < 2 * layer["tokens"].min()


def test_correlation(run: Run, predicted: pd.DataFrame) -> None:
    table = surprisal_correlation(run)
    assert (table["n"] == len(predicted)).all()
    loss = np.floor(np.sqrt(predicted["loss"]) * 6)
    groups = predicted["document"] % 20
    for row in table.itertuples():
        nnz = predicted[row.layer]
        classes = nnz.where(nnz < 8, np.floor(np.sqrt(8 * nnz)))
        both = pd.DataFrame({"loss": loss, "nnz": classes})
        share = kept(classes, lambda n: n if n < 8 else np.floor(np.sqrt(8 * n)), loss)
        assert row.spearman == pytest.approx(stats.spearmanr(both).statistic / share, rel=1e-9)
        ends = correlation_interval(
            groups, lambda rows, by=share: float(np.arctanh(stats.spearmanr(rows).statistic / by)), both
        )
        assert (row.low, row.high) == pytest.approx(ends, rel=1e-7)


@pytest.fixture(scope="module")
def known(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """Unflagged rows with both losses, the class of the token, and what correlations are made of."""
    text = run.vocab["text"]
    own = rows.groupby("sequence")["loss"].shift(1)
    frame = rows.assign(own=own, kind=[classify(text[token]) for token in rows["token_id"]])
    return frame[frame["flags"] == 0]


@pytest.mark.parametrize("of", ["next", "own"])
def test_correlation_by_class(run: Run, known: pd.DataFrame, of: Literal["next", "own"]) -> None:
    column = {"next": "loss", "own": "own"}[of]
    there = known[known[column].notna()]
    every = surprisal_correlation(run, of=of, by_class=True)
    assert set(every["class"]) == set(there["kind"])
    tables = [every] if of == "next" else [every, surprisal_correlation(run, of=of).assign(**{"class": "all"})]
    for row in pd.concat(tables).itertuples(index=False):
        here = there if row[0] == "all" else there[there["kind"] == row[0]]
        loss, nnz = np.floor(3 * np.sqrt(here[column])), np.floor(8 * np.sqrt(np.sqrt(here[row.layer])))
        both = pd.DataFrame({"loss": loss, "nnz": nnz})
        assert row.n == len(here)
        share = kept(nnz, lambda n: np.floor(8 * np.sqrt(np.sqrt(n))), loss)
        assert row.spearman == pytest.approx(stats.spearmanr(both).statistic / share, rel=1e-9, abs=1e-12, nan_ok=True)
        if row.layer:
            continue

        def correlation(rows: pd.DataFrame, by: float = share) -> float:
            return float(np.arctanh(stats.spearmanr(rows).statistic / by))

        ends = correlation_interval(here["document"] % 10, correlation, both)
        assert (row.low, row.high) == pytest.approx(ends, rel=1e-7, nan_ok=True)


def test_correlations_are_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are worked out where summaries are built, and not where they are asked for."""
    ensure(run)
    monkeypatch.delitem(derived.__dict__, "grouped_spearman")
    for of in ("next", "own"):
        for by_class in (False, True):
            assert len(surprisal_correlation(run, of=of, by_class=by_class)) >= run.layers


@pytest.mark.parametrize("of", ["next", "own"])
def test_coarse_classes_lose_little(run: Run, known: pd.DataFrame, of: Literal["next", "own"]) -> None:
    there = known[known[{"next": "loss", "own": "own"}[of]].notna()]
    for row in surprisal_correlation(run, of=of, by_class=True).itertuples(index=False):
        here = there[there["kind"] == row[0]]
        if len(here) < 1000:
            continue
        untied = stats.spearmanr(here[{"next": "loss", "own": "own"}[of]], here[row.layer]).statistic
        assert row.spearman == pytest.approx(untied, abs=0.02)


@pytest.mark.parametrize(("of", "kind"), [("own", None), ("own", "word-inner piece"), ("next", "word-initial piece")])
def test_curve_within_a_class(run: Run, known: pd.DataFrame, of: Literal["next", "own"], kind: str | None) -> None:
    column = {"next": "loss", "own": "own"}[of]
    there = known[known[column].notna() & ((known["kind"] == kind) | (kind is None))]
    table = surprisal(run, bins=6, of=of, token_class=kind)
    assert table["tokens"].sum() == len(there) * run.layers
    groups = there["document"] % 10
    for row in table.itertuples():
        here = there[(there[column] >= row.loss_low) & (there[column] < row.loss_high)]
        assert (row.tokens, row.nnz_mean) == (len(here), pytest.approx(here[row.layer].mean(), rel=1e-9))
        if row.layer == 0:
            error = jackknife(groups, lambda rows: rows[0].mean(), here)
            assert row.nnz_se == pytest.approx(error, rel=1e-9)


def test_unknown_class(run: Run) -> None:
    with pytest.raises(UserError, match=r"Expected a class of URL part, .*got 'verb'"):
        surprisal(run, token_class="verb")
    with pytest.raises(Missing, match="holds no URL part that has a loss"):
        surprisal(run, token_class="URL part")


def test_long_runs_are_sampled_by_groups_of_documents(
    made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_tables, "CLASS_TOKENS", 1500)
    run = made.make(tmp_path / "long", sequences=200, length=16, parts=3, layers=2)
    assert rank_tables.class_step(run) == 1
    monkeypatch.setattr(rank_tables, "CLASS_TOKENS", 600)
    assert rank_tables.class_step(run) == 4
    rows = run.activity(flagged=False).dropna(subset="loss")
    some = rows[rows["sequence"] // 2 // 20 % 4 == 0]
    assert 0 < len(some) < len(rows) / 2
    assert surprisal_correlation(run, by_class=True).groupby("layer")["n"].sum().tolist() == [len(some)] * 2


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
        for of in ("next", "own"):
            with pytest.raises(Missing, match="--no-loss"):
                question(run, of=of)


def test_fewer_documents_than_groups(made: ModuleType, tmp_path: Path) -> None:
    def spread(columns: dict[str, Any]) -> dict[str, Any]:
        return {**columns, "sequence": columns["sequence"] * 4}  # documents 0, 2, 4, …

    run = made.make(tmp_path / "seven", sequences=7, parts=1, layers=1, change=spread)
    rows = run.activity(flagged=False).dropna(subset="loss")
    error = jackknife(rows["sequence"], lambda rows: rows["nnz_00"].mean(), rows)
    table = surprisal(run, bins=1)
    assert table["nnz_se"].item() == pytest.approx(error, rel=1e-9)
    assert "from 7 groups" in table.attrs["note"]
    notes = [surprisal_correlation(run, of=of, by_class=of == "own").attrs["note"] for of in ("next", "own")]
    assert ["from 7 groups" in notes[0], "from 5 groups" in notes[1]] == [True, True], "of 20 and of 10"


def test_one_sequence_has_no_interval(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "one", sequences=1, parts=1, layers=1)
    table = surprisal_correlation(run)
    assert table["spearman"].notna().all()
    assert table["low"].isna().all()
    assert surprisal(run)["nnz_se"].isna().all()


def test_impossible_bins(run: Run) -> None:
    with pytest.raises(UserError, match="at least 1 bin"):
        surprisal(run, bins=0)
