"""Tokens that the vocabulary lacks, in its middle and past its end: counted, of the last class, shown by their ids."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scipy import stats
from support.clusters import kept
from support.rewritten import relisted

from twell.analysis import by_neuron, by_token, surprisal, surprisal_correlation, token_classes
from twell.analysis.summaries.token_class import classify
from twell.workbench.run.store import Run

LACKING = [1, 2, 7, *range(40, 60), *range(150, 200)]  # common ones, the planted ones, and all past 149


@pytest.fixture(scope="module")
def poor(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A made run of several parts whose vocabulary lacks some of its tokens."""
    run = made.make(tmp_path_factory.mktemp("poor") / "poor", seed=9)
    (file,) = run.parts("vocab")
    table = pq.read_table(file)
    text = pa.array([" the", *table["text"].to_pylist()[1:]])  # the first one is not of the last class either
    table = table.set_column(table.schema.get_field_index("text"), "text", text)
    pq.write_table(table.filter(~np.isin(table["token_id"].to_numpy(), LACKING)), file)
    return relisted(run, "vocab")


@pytest.fixture(scope="module")
def known(poor: Run) -> pd.DataFrame:
    """Unflagged rows as plain numbers, with both losses, the class of the token, and nnz by layer."""
    rows = poor.frame("activity")
    rows["loss"] = rows["loss"].astype(float)
    rows["own"] = rows.groupby("sequence")["loss"].shift(1)
    text = poor.frame("vocab").set_index("token_id")["text"]
    rows["kind"] = [classify(text.get(token, "�")) for token in rows["token_id"]]
    rows = rows[rows["flags"] == 0]
    assert rows["token_id"].isin(LACKING).mean() > 0.2
    return rows.rename(columns={f"nnz_0{layer}": layer for layer in range(4)}).astype(dict.fromkeys(range(4), float))


def test_they_are_of_the_last_class(poor: Run, known: pd.DataFrame) -> None:
    table = token_classes(poor).set_index("class")
    assert table["count"].to_dict() == known["kind"].value_counts().to_dict()
    assert table["tokens"].to_dict() == known.groupby("kind")["token_id"].nunique().to_dict()
    assert table.loc["other", "tokens"] == known.loc[known["token_id"].isin(LACKING), "token_id"].nunique()
    for kind, there in known.groupby("kind"):
        assert table.loc[kind, "mean"] == pytest.approx(there[list(range(4))].to_numpy().mean(), rel=1e-9)


@pytest.mark.parametrize("of", ["next", "own"])
def test_their_losses_count(poor: Run, known: pd.DataFrame, of: Literal["next", "own"]) -> None:
    column = {"next": "loss", "own": "own"}[of]
    there = known[known[column].notna()]
    table = surprisal_correlation(poor, of=of, by_class=True)
    assert set(table["class"]) == set(there["kind"]) and "other" in set(table["class"])
    whole = surprisal_correlation(poor, of="own").assign(**{"class": "all"}) if of == "own" else table[:0]
    for row in pd.concat([table, whole]).itertuples(index=False):
        here = there if row[0] == "all" else there[there["kind"] == row[0]]
        loss, nnz = np.floor(3 * np.sqrt(here[column])), np.floor(8 * np.sqrt(np.sqrt(here[row.layer])))
        assert row.n == len(here)
        exact = stats.spearmanr(loss, nnz).statistic / kept(nnz, lambda n: np.floor(8 * np.sqrt(np.sqrt(n))), loss)
        assert row.spearman == pytest.approx(exact, rel=1e-9, abs=1e-12)
    curve = surprisal(poor, bins=1, of=of, token_class="other").set_index("layer")
    here = there[there["kind"] == "other"]
    assert curve["tokens"].tolist() == [len(here)] * 4
    np.testing.assert_allclose(curve["nnz_mean"], here[list(range(4))].mean(), rtol=1e-9)


def test_they_are_shown_by_their_ids(poor: Run, known: pd.DataFrame) -> None:
    table = by_token(poor, min_count=1).set_index("token_id")
    vocab = poor.frame("vocab").set_index("token_id")["text"]
    assert table["text"].to_dict() == {token: vocab.get(token, f"<{token}>") for token in known["token_id"].unique()}
    parts = poor.frame("neurons").groupby(["layer", "neuron"])
    low, high = parts["token_min"].min(), parts["token_max"].max()
    one = low[low == high]
    texts = by_neuron(poor).set_index(["layer", "neuron"]).loc[one.index, "token_text"]
    assert texts.tolist() == [vocab.get(token, f"<{token}>") for token in one]
    assert one.isin(LACKING).any() and not one.isin(LACKING).all()
