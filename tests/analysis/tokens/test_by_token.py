"""Tokens against loops over sequences, and against what was planted."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.clusters import centred_error, effective, pooled
from support.rewritten import forget_checksums

from twell.analysis import by_layer, by_token, surprisal_correlation, token_profile
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

PRIOR = 10  # documents that the common variance weighs as much as


def clustered_error(values: pd.Series, documents: pd.Series) -> float:
    """The standard error of a mean by its definition: a residual a document, squared, summed."""
    mean, n = values.mean(), len(values)
    residuals = [(group - mean).sum() for _, group in values.groupby(documents)]
    k = n**2 / np.sum(np.square(documents.value_counts()))
    return float(np.sqrt(k / (k - 1) * np.sum(np.square(residuals))) / n) if len(residuals) > 1 else np.nan


def placed(rows: pd.DataFrame, layers: list[int]) -> pd.Series:
    """z within layer and band of positions, mean over layers that vary there; position 0 counts unless not finite."""
    position = rows["position"]
    band = position.where(position < 8, np.floor(np.sqrt(8 * position)))
    counted = (rows["flags"] == 0) | ((position == 0) & (rows["flags"] < 4))
    inside = rows[counted].groupby(band[counted])
    by_band = inside[layers].mean(), inside[layers].std(ddof=0)
    mean, sd = (statistic.reindex(band).set_axis(rows.index) for statistic in by_band)
    return ((rows[layers] - mean) / sd.where(sd > 0)).mean(axis=1).fillna(0)


@pytest.fixture
def scored(rows: pd.DataFrame, used: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Used rows with z by layer (z0, z1, …), z, the mean over layers, and the token's own loss."""
    layers = list(range(run.layers))
    plain = rows.loc[rows["flags"] == 0, layers]
    z = (used[layers] - plain.mean()) / plain.std(ddof=0)
    own = rows.groupby("sequence")["loss"].shift(1)
    frame = used.assign(z=z.mean(axis=1), mean=used[layers].mean(axis=1), own=own.loc[used.index])
    frame["z_position"] = placed(rows, layers).loc[used.index]
    return frame.join(z.rename(columns={layer: f"z{layer}" for layer in layers}))


def pooled_of(groups: dict[int, pd.DataFrame], plain: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the standard error of every token's mean and its degrees of freedom, by token; plain: unflagged rows."""
    rows = {
        token: {
            "error": centred_error(there[name], there["document"], plain[name], plain["document"]),
            "n": len(there),
            "clusters": effective(there["document"]),
            "mean": there[name].mean(),
        }
        for token, there in groups.items()
    }
    table = pd.DataFrame(rows).T
    result = pooled(table, PRIOR)
    assert 0.2 < (result["error"] > table["error"]).mean() < 0.8, "some are drawn up, some down"
    return result


def test_by_token(run: Run, scored: pd.DataFrame, flagged: bool) -> None:
    table = by_token(run, min_count=20, flagged=flagged)
    sizes = scored.groupby("token_id").size()
    assert set(table["token_id"]) == set(sizes[sizes >= 20].index)
    assert table["shrunk"].is_monotonic_decreasing
    assert by_token(run, flagged=flagged, rank="z")["z"].is_monotonic_decreasing
    groups = dict(list(scored.groupby("token_id")))
    plain = scored[scored["flags"] == 0]
    told = {name: pooled_of(groups, plain, name) for name in ("z", "z_position")}
    for row in table.itertuples():
        there = groups[row.token_id]
        assert row.count == len(there)
        assert (row.sequences, row.documents) == (there["sequence"].nunique(), there["document"].nunique())
        assert row.effective == pytest.approx(len(there) ** 2 / (there["document"].value_counts() ** 2).sum())
        expected = {
            "z": there["z"].mean(),
            "degrees": told["z"]["degrees"][row.token_id],
            "z_position": there["z_position"].mean(),
            "mean": there["mean"].mean(),
            "mean_se": clustered_error(there["mean"], there["document"]),
            "loss_mean": there["loss"].mean(),
            "surprisal_mean": there["own"].mean(),
        }
        for name, value in expected.items():
            assert getattr(row, name) == pytest.approx(value, rel=1e-9, abs=1e-11), (row.token_id, name)
        for name, fitted in told.items():
            assert getattr(row, f"{name}_se") == pytest.approx(fitted["error"][row.token_id], rel=1e-5), row.token_id
    missing = (sizes < 20).sum()
    assert table.attrs["note"].startswith(f"left out: {missing} of {len(sizes)} tokens")


def test_some_token_is_flagged_in_a_sequence_where_it_also_stands_unflagged(rows: pd.DataFrame) -> None:
    """Else the sums that flagged tokens add would never be more than plain ones."""
    flags = rows.groupby(["sequence", "token_id"])["flags"]
    assert ((flags.max() > 0) & (flags.min() == 0)).sum() > 10


def test_planted_tokens(made: ModuleType, run: Run) -> None:
    table = by_token(run)
    assert table["token_id"].iloc[0] == made.LOUD
    assert table["token_id"].iloc[-1] == made.QUIET
    assert table["text"].iloc[0] == " formaldehyde"


def test_token_profile(run: Run, scored: pd.DataFrame, flagged: bool, made: ModuleType) -> None:
    for token in (made.LOUD, made.QUIET, 1):
        table = token_profile(run, token, flagged=flagged)
        there = scored[scored["token_id"] == token]
        assert list(table["layer"]) == list(range(run.layers))
        assert (table["count"] == len(there)).all()
        for row in table.itertuples():
            z = there[f"z{row.layer}"]
            assert row.mean == pytest.approx(there[row.layer].mean(), rel=1e-9)
            assert row.z == pytest.approx(z.mean(), rel=1e-9)
            own, of_layer = clustered_error(z, there["document"]), layer_error(scored, f"z{row.layer}")
            together = go_together(there, scored[scored["flags"] == 0])
            assert row.z_se == pytest.approx(np.sqrt(own**2 + of_layer**2 - 2 * together * own * of_layer), rel=1e-9)
            assert row.effective == pytest.approx(effective(there["document"]))


def layer_error(scored: pd.DataFrame, name: str) -> float:
    """The jackknife standard error of a column's mean over unflagged rows, over twenty groups of documents."""
    plain = scored[scored["flags"] == 0]
    groups = plain["document"] % 20
    without = np.array([plain.loc[groups != group, name].mean() for group in groups.unique()])
    return float(np.sqrt((len(without) - 1) / len(without) * ((without - plain[name].mean()) ** 2).sum()))


def go_together(there: pd.DataFrame, plain: pd.DataFrame) -> float:
    """The correlation over documents of what each adds to a token's mean z and to that of all tokens."""
    own = (there["z"] - there["z"].mean()).groupby(there["document"]).sum()
    of_all = plain["z"].groupby(plain["document"]).sum()
    return float((own * of_all.reindex(own.index)).sum() / np.sqrt((own**2).sum() * (of_all**2).sum()))


def test_flagged_special_token_appears_only_when_asked(bos_run: Run) -> None:
    assert 0 not in set(by_token(bos_run)["token_id"])
    table = by_token(bos_run, flagged=True).set_index("token_id")
    assert table.loc[0, "count"] == 40
    assert table.loc[0, "text"] == "<s>"
    assert np.isnan(table.loc[0, "surprisal_mean"])


def test_summaries_written_while_they_are_read(made: ModuleType, tmp_path: Path, flagged: bool) -> None:
    """Of a run that grows, one may hold tokens that the other does not yet: those of both are told, each by its own."""
    run = made.make(tmp_path / "grown", sequences=20, parts=1, timings=0)
    whole = by_token(run, min_count=1, flagged=flagged).set_index("token_id")
    for name, missing in (("tokens", [3, 90]), ("token_scores", [1, made.LOUD])):
        rows = pd.read_parquet(run.summary_path(name))
        rows[~rows["token_id"].isin(missing)].to_parquet(run.summary_path(name))
    forget_checksums(run)
    table = by_token(run, min_count=1, flagged=flagged).set_index("token_id")
    assert set(whole.index) - set(table.index) == {1, 3, 90, made.LOUD} & set(whole.index)
    columns = ["count", "z", "mean", "loss_mean"]
    pd.testing.assert_frame_equal(table[columns].sort_index(), whole.loc[sorted(table.index), columns])


def test_fewer_tokens_than_the_minimum(run: Run) -> None:
    most = int(by_token(run, min_count=1)["count"].max())
    with pytest.raises(Missing, match=f"the most frequent one {most} times"):
        by_token(run, min_count=most + 1)


def test_a_token_in_one_document_has_no_error(made: ModuleType, tmp_path: Path) -> None:
    table = by_token(made.make(tmp_path / "few", sequences=6, parts=1), min_count=1)
    one = table[table["documents"] == 1]
    assert (one["sequences"] == 2).any()
    assert one["z_se"].isna().all()
    assert table[table["documents"] > 1]["z_se"].notna().all()


def test_unknown_token(run: Run) -> None:
    with pytest.raises(Missing, match="Token 99999 does not occur"):
        token_profile(run, 99999)


def test_a_layer_where_every_token_fires_alike(made: ModuleType, tmp_path: Path) -> None:
    """It has no spread to measure by: z leaves it out, and its rank correlation is empty."""

    def level(columns: dict[str, Any]) -> dict[str, Any]:
        seldom = columns["nnz_02"] % 2  # a spread under one neuron is one
        return {**columns, "nnz_01": np.full_like(columns["nnz_01"], 7), "nnz_02": seldom}

    run = made.make(tmp_path / "level", sequences=40, parts=1, layers=3, change=level)
    rows = run.activity(flagged=False)
    others = rows[["nnz_00", "nnz_02"]]
    z = ((others - others.mean()) / others.std(ddof=0)).mean(axis=1)
    table = by_token(run).set_index("token_id")
    expected = z.groupby(rows["token_id"]).mean()
    np.testing.assert_allclose(table["z"], expected[table.index], rtol=1e-9, atol=1e-12)
    profile = token_profile(run, int(table.index[0])).set_index("layer")
    assert profile[["z", "z_se"]].isna().all(axis=1).tolist() == [False, True, False]
    assert surprisal_correlation(run)["spearman"].isna().tolist() == [False, True, False]
    assert by_layer(run)["sd"].tolist()[1] == 0


def test_ranked_within_position(run: Run) -> None:
    table = by_token(run, rank="z_position")
    assert table["z_position"].is_monotonic_decreasing
    assert table["token_id"].tolist() != by_token(run)["token_id"].tolist()
    assert set(table["token_id"]) == set(by_token(run)["token_id"])
