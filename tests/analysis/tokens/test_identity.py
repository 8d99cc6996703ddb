"""How much the token explains, against analysis of variance on the rows."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.clusters import correlation_interval

from twell.analysis import across_layers, by_token, token_covariates, token_identity
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


def test_against_analysis_of_variance(run: Run, rows: pd.DataFrame) -> None:
    plain = rows[rows["flags"] == 0]
    table = token_identity(run)
    sizes = plain["token_id"].value_counts()
    total, kinds = len(plain), len(sizes)
    for layer, row in table.iterrows():
        nnz = plain[layer]
        within = ((nnz - nnz.groupby(plain["token_id"]).transform("mean")) ** 2).sum()
        everything = ((nnz - nnz.mean()) ** 2).sum()
        assert row["explained"] == pytest.approx(1 - within / everything, rel=1e-9)
        ms_between, ms_within = (everything - within) / (kinds - 1), within / (total - kinds)
        size = (total - (sizes**2).sum() / total) / (kinds - 1)
        assert row["icc"] == pytest.approx((ms_between - ms_within) / (ms_between + (size - 1) * ms_within), rel=1e-9)
        assert row["sd_within"] == pytest.approx(np.sqrt(within / total))


@pytest.mark.parametrize(("by_token_alone", "icc"), [(True, 1.0), (False, 0.0)])
def test_lookup_or_chance(made: ModuleType, tmp_path: Path, by_token_alone: bool, icc: float) -> None:
    def change(columns: dict[str, Any]) -> dict[str, Any]:
        chance = np.random.default_rng(0).integers(0, 200, len(columns["flags"]))
        nnz = (columns["token_id"] if by_token_alone else chance).astype(np.uint16)
        return {**columns, "nnz_00": nnz}

    run = made.make(tmp_path / "one", layers=1, sequences=60, parts=1, change=change, neurons=False, tiles=False)
    assert token_identity(run)["icc"].item() == pytest.approx(icc, abs=0.03)


def test_covariates(run: Run) -> None:
    table, tokens = token_covariates(run).set_index("covariate"), by_token(run)
    text = tokens["text"]
    columns = {
        "log_count": np.log(tokens["count"]),
        "begins_word": text.str.startswith(" ").astype(float),
        "has_letter": text.str.contains(r"[^\W\d_]").astype(float),
        "characters": text.str.len().astype(float),
        "surprisal_mean": tokens["surprisal_mean"],
    }
    names = list(table.index)
    assert {"log_count", "begins_word", "surprisal_mean"} <= set(names)
    x = np.column_stack([np.ones(len(tokens)), *(columns[name] for name in names)])
    expected = np.linalg.lstsq(x, tokens["z"].to_numpy(), rcond=None)[0][1:]
    np.testing.assert_allclose(table.loc[names, "coefficient"], expected, rtol=1e-6)
    residual, error = tokens["z"].to_numpy() - x @ np.linalg.lstsq(x, tokens["z"].to_numpy(), rcond=None)[0], []
    left = 1 - np.diag(x @ np.linalg.inv(x.T @ x) @ x.T)  # 0 for a token that alone tells a covariate, fitted as it is
    deleted = np.divide(residual, left, out=np.zeros(len(x)), where=left > 1e-9)
    for column in range(1, x.shape[1]):  # HC3 by the residual of each covariate on the others
        others = np.delete(x, column, axis=1)
        own = x[:, column] - others @ np.linalg.lstsq(others, x[:, column], rcond=None)[0]
        error.append(np.sqrt(np.sum((own * deleted) ** 2)) / np.sum(own**2))
    half = stats.t.ppf(0.975, len(x) - x.shape[1]) * np.array(error)
    np.testing.assert_allclose(table.loc[names, "low"], expected - half, rtol=1e-6)
    np.testing.assert_allclose(table.loc[names, "high"], expected + half, rtol=1e-6)
    spreads = [columns[name].std() for name in names]
    np.testing.assert_allclose(table.loc[names, "standardised"], expected * spreads, rtol=1e-6)
    assert table.loc["log_count", "alone"] == pytest.approx(stats.linregress(columns["log_count"], tokens["z"]).slope)
    with pytest.raises(Missing, match="too few"):
        token_covariates(run, min_count=int(tokens["count"].max()))


def test_across_layers(run: Run, rows: pd.DataFrame, made: ModuleType, tmp_path: Path) -> None:
    plain = rows[rows["flags"] == 0]
    table = across_layers(run)
    assert list(zip(table["layer"], table["other"], strict=True)) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    for row in table.itertuples():
        assert row.spearman == pytest.approx(stats.spearmanr(plain[row.layer], plain[row.other]).statistic, rel=1e-9)
        ranks = plain[["document"]].assign(a=stats.rankdata(plain[row.layer]), b=stats.rankdata(plain[row.other]))
        ends = correlation_interval(
            plain["document"] % 20, lambda left: float(np.arctanh(left["a"].corr(left["b"]))), ranks
        )
        assert (row.low, row.high) == pytest.approx(ends, rel=1e-6)
    with pytest.raises(Missing, match="one layer"):
        across_layers(made.make(tmp_path / "one", layers=1, sequences=4, parts=1))


def test_across_layers_holds_the_ranks_of_one_group_of_documents(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "long", layers=8, sequences=300, length=512, parts=1)
    across_layers(run)  # what is read for the first time is kept
    tracemalloc.start()
    tokens = across_layers(run)["tokens"].max()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < tokens * run.layers * 8  # bytes of all ranks
