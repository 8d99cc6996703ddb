"""Intervals of places that few groups of documents reach, and of two runs of which one lacks a group."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from twell.analysis import compare_layers, compare_positions, position_fit
from twell.analysis.activity.replicates import apart, mean_counts
from twell.analysis.changes import headline_changes
from twell.analysis.claims.activity import early_peak, falls_exponentially
from twell.analysis.claims.claim import UNTOLD
from twell.analysis.figures.positions import position_bins
from twell.analysis.figures.small_multiples import _with_interval
from twell.analysis.statistics import jackknife_error
from twell.workbench.run.schema import FLAG_NOT_FINITE
from twell.workbench.run.store import Run

SHORT = 20  # positions of all documents but the first ones


def reached_by(documents: int) -> Any:
    """Later positions are reached by so many documents alone, of two sequences each."""

    def change(columns: dict[str, Any]) -> dict[str, Any]:
        kept = (columns["sequence"] < 2 * documents) | (columns["position"] < SHORT)
        return {name: values[kept] for name, values in columns.items()}

    return change


@pytest.fixture(scope="module")
def runs(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Run]:
    """Runs over texts of their own, by how many documents reach the later positions, and by seed."""
    folder = tmp_path_factory.mktemp("reached")
    return {
        (documents, seed): made.make(
            folder / f"{documents}-{seed}", seed=seed, length=256, sequences=80, change=reached_by(documents)
        )
        for documents in (1, 3)
        for seed in (1, 2)
    }


def test_a_place_has_the_degrees_of_the_groups_that_reach_it(runs: dict[tuple[int, int], Run]) -> None:
    """One has no interval; that of three is Welch's with their degrees, not with those of all twenty groups."""
    alone = compare_positions([runs[1, 1], runs[1, 2]])
    assert alone.loc[alone["band"] < SHORT // 2, "low"].notna().all()
    assert alone.loc[alone["band"] > SHORT, ["low", "high", "ratio_low", "ratio_high"]].isna().all(axis=None)
    table = compare_positions([runs[3, 1], runs[3, 2]]).set_index(["layer", "band"])
    band, errors, degrees = 18, [], []  # from position 41 on
    for run in (runs[3, 1], runs[3, 2]):
        rows = run.activity(flagged=False)
        rows = rows[np.floor(np.sqrt(8.0 * rows["position"])) == band]
        groups = rows.groupby(rows["sequence"] // 2)["nnz_00"].agg(["sum", "size"])
        rest = groups.sum() - groups
        without = [*(rest["sum"] / rest["size"]), *[rows["nnz_00"].mean()] * 17]  # 17 more groups have no token there
        errors.append(float(jackknife_error(rows["nnz_00"].mean(), np.array(without))))
        degrees.append(groups["size"].sum() ** 2 / (groups["size"] ** 2).sum() - 1)
        assert len(groups) == 3
    welch = np.hypot(*errors) ** 4 / sum(error**4 / each for error, each in zip(errors, degrees, strict=True))
    half = stats.t.ppf(0.975, welch) * np.hypot(*errors)
    row = table.loc[(0, band)]
    assert not row["paired"] and row["high"] - row["difference"] == pytest.approx(half, rel=1e-6)


def test_a_ratios_interval_is_that_of_its_logarithm(runs: dict[tuple[int, int], Run]) -> None:
    for table in (compare_layers([runs[3, 1], runs[3, 2]]), compare_layers([runs[3, 1], runs[3, 1]])):
        assert (table["ratio_low"] <= table["ratio"]).all()
        np.testing.assert_allclose(table["ratio"] / table["ratio_low"], table["ratio_high"] / table["ratio"])


def test_a_run_that_lacks_a_group_is_compared_by_the_others(made: ModuleType, tmp_path: Path) -> None:
    """The first document of one of them is not finite: it has no counted token, where the other run's has."""

    def broken(columns: dict[str, Any]) -> dict[str, Any]:
        flags = np.where(columns["sequence"] < 2, columns["flags"] | FLAG_NOT_FINITE, columns["flags"])
        return {**columns, "flags": flags.astype(columns["flags"].dtype)}

    whole, lacks = (
        made.make(tmp_path / name, seed=1, sequences=16, **change)
        for name, change in (("whole", {}), ("lacks", {"change": broken}))
    )
    for one, other in ((whole, lacks), (lacks, whole)):
        table = compare_layers([one, other])
        assert table["paired"].all() and table[["low", "high"]].notna().all(axis=None)
        rows = [run.activity(flagged=False) for run in (one, other)]
        assert table["difference"][0] == pytest.approx(rows[1]["nnz_00"].mean() - rows[0]["nnz_00"].mean())
        assert headline_changes([one, other])["low"].notna().any()


def test_without_an_interval_nothing_is_denied(
    runs: dict[tuple[int, int], Run], made: ModuleType, tmp_path: Path
) -> None:
    """Early positions fire more in these runs: where one document reaches late ones, that it is so cannot be told."""
    fits = position_fit(runs[1, 1])
    assert (fits["verdict"] == "cannot be told").all() and fits["drop_low"].isna().all()
    assert falls_exponentially(runs[1, 1]).verdict == UNTOLD
    assert position_fit(runs[3, 1])["drop_low"].notna().all()
    single = made.make(tmp_path / "single", seed=3, length=256, sequences=8, of_document=8)
    assert early_peak(single).verdict == UNTOLD


def test_no_band_is_drawn_where_there_is_no_interval(runs: dict[tuple[int, int], Run]) -> None:
    bins = position_bins(runs[1, 1])
    late = bins["position_to"] >= SHORT
    assert bins.loc[late, ["low", "high"]].isna().all(axis=None) and (bins["low"] < bins["high"])[~late].all()
    stretches = _with_interval(bins[bins["layer"] == 0].assign(low=lambda b: b["low"].where(b["position_from"] != 3)))
    assert len(stretches) == 2 and sum(map(len, stretches)) == int((~late & (bins["layer"] == 0)).sum()) - 1


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(("groups", "known"), [(2, False), (3, False), (5, False), (6, True)])
def test_a_few_groups_that_differ_by_exactly_as_much_tell_nothing(groups: int, known: bool, paired: bool) -> None:
    """Whole counts do by chance: of two documents of one token, 9 % of places without a difference had a q of 0."""
    counts = np.full((2, groups), [[4.0], [7.0]])
    tokens, more = pd.DataFrame(np.ones((2, groups))), np.array([[3.0], [0.0]])
    a, b = (
        mean_counts(pd.concat({"tokens": tokens, "nnz_sum": pd.DataFrame(each)}, axis=1))
        for each in (counts, counts + more)
    )
    difference, error, freedom = apart(a, b, np.full((2, 2), groups - 1.0), paired)
    assert difference.tolist() == [3, 0] and freedom.tolist() == [groups - 1] * 2
    assert np.isnan(error).tolist() == [not known, False] and np.nansum(error) == 0


def test_layers_that_fire_nothing_in_either_run_differ_by_nothing(made: ModuleType, tmp_path: Path) -> None:
    """Over texts of their own too; of single documents nothing is known, though they show no error either."""

    def silent(columns: dict[str, Any]) -> dict[str, Any]:
        return {**columns, "nnz_01": np.zeros_like(columns["nnz_01"])}

    for documents, told in ((20, True), (1, False)):
        of_each: dict[str, Any] = {"sequences": 20, "of_document": 20 // documents, "neurons": False, "change": silent}
        one, other = (made.make(tmp_path / f"{documents}-{seed}", seed=seed, layers=2, **of_each) for seed in (1, 2))
        row = compare_layers([one, other]).set_index("layer").loc[1]
        assert not row["paired"] and row["difference"] == 0
        assert row[["low", "high"]].tolist() == [0, 0] if told else row[["low", "high"]].isna().all()
