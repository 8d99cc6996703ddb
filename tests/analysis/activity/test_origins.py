"""By source, by phase and by what begins a sequence, against the rows themselves."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.clusters import correlation_interval
from support.questions import degrees

from twell.analysis import by_phase, by_source, first_positions, surprisal_within
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


def jackknifed(statistic: Any, rows: pd.DataFrame) -> float:
    groups = rows["document"] % 20
    left = [statistic(rows[groups != group]) for group in sorted(set(groups))]
    return float(np.sqrt((len(left) - 1) / len(left) * ((np.array(left) - statistic(rows)) ** 2).sum()))


@pytest.fixture(scope="module")
def counted(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[(rows["flags"] == 0) | ((rows["position"] == 0) & (rows["flags"] < 4))]


def test_first_positions(run: Run, counted: pd.DataFrame) -> None:
    table = first_positions(run)
    assert set(table["start"]) == {"all", "document", "cut"}
    later = counted[counted["position"] > 0]
    for row in table[table["layer"].isin((1, -1))].itertuples():
        nnz = counted[[0, 1, 2, 3]].sum(axis=1) if row.layer < 0 else counted[row.layer]
        starts = {"all": [0, 1], "document": [0], "cut": [1]}[row.start]
        first = counted[(counted["position"] == 0) & (counted["sequence"] % 2).isin(starts)]
        assert (row.tokens, row.mean) == (len(first), pytest.approx(nnz[first.index].mean()))
        assert row.ratio == pytest.approx(nnz[first.index].mean() / nnz[later.index].mean())

        def log_ratio(rows: pd.DataFrame, nnz: pd.Series = nnz, first: pd.DataFrame = first) -> float:
            return float(
                np.log(nnz[rows.index.intersection(first.index)].mean() / nnz[rows[rows["position"] > 0].index].mean())
            )

        t = stats.t.ppf(0.975, min(degrees(first["document"] % 20), degrees(later["document"] % 20)))
        assert np.log(row.high / row.ratio) == pytest.approx(t * jackknifed(log_ratio, counted), rel=1e-6)


def test_sources(made: ModuleType, tmp_path: Path, run: Run, counted: pd.DataFrame) -> None:
    table = by_source(run)
    assert set(table["source"]) == {"made:text"}
    later = counted[counted["position"] > 0]
    np.testing.assert_allclose(table["mean"][:4], later[[0, 1, 2, 3]].mean())
    assert table["ratio"].isna().all(), "there is no other"
    assert table["loss_mean"].iloc[0] == pytest.approx(later["loss"].mean())


def test_phases(made: ModuleType, tmp_path: Path) -> None:
    """Generated tokens fire half as much as those of the prompt."""

    def generated(columns: dict[str, Any]) -> dict[str, Any]:
        decode = columns["position"] >= 20
        counts = {name: np.where(decode, each // 2, each) for name, each in columns.items() if name[:4] == "nnz_"}
        return {**columns, **counts, "phase": decode.astype(np.uint8)}

    run = made.make(tmp_path / "generated", sequences=120, change=generated)
    table = by_phase(run).set_index(["phase", "layer"])
    rows = run.activity(flagged=False)
    for phase, number in (("prefill", 0), ("decode", 1)):
        expected = rows[rows["phase"] == number]
        assert table.loc[(phase, 2), "tokens"] == len(expected)
        assert table.loc[(phase, 2), "mean"] == pytest.approx(expected["nnz_02"].mean())
    assert table.loc[("decode", -1), "ratio_high"] < 1 < table.loc[("prefill", -1), "ratio_low"]
    assert table.loc[("decode", -1), "ratio"] * table.loc[("prefill", -1), "ratio"] == pytest.approx(1)


def test_within_tokens(run: Run, rows: pd.DataFrame) -> None:
    """Each number less the mean of its token, and the interval by its definition."""
    plain = rows[rows["flags"] == 0]
    known = plain.dropna(subset="loss")
    table = surprisal_within(run)
    for layer in range(run.layers):
        x = known[layer] - known["token_id"].map(plain.groupby("token_id")[layer].mean())
        y = known["loss"] - known["token_id"].map(known.groupby("token_id")["loss"].mean())
        both = known[["document"]].assign(x=x, y=y)

        def correlation(rows: pd.DataFrame) -> float:
            return float(
                np.arctanh((rows["x"] * rows["y"]).sum() / np.sqrt((rows["x"] ** 2).sum() * (rows["y"] ** 2).sum()))
            )

        row = table.iloc[layer]
        assert row["pearson"] == pytest.approx(np.tanh(correlation(both)), rel=1e-5)
        ends = correlation_interval(both["document"] % 20, correlation, both)
        assert (row["low"], row["high"]) == pytest.approx(ends, rel=1e-4)
        assert row["n"] == len(known)


def test_no_loss_has_no_correlation_within_tokens(made: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="--no-loss"):
        surprisal_within(made.make(tmp_path / "bare", sequences=8, loss=False, parts=1))
