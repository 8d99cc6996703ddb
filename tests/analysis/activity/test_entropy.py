"""Entropy beside the loss: against numpy on the rows, planted relations, and runs of before it was recorded."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from scipy import stats
from support.clusters import correlation_interval, kept
from support.rewritten import relisted

from twell.analysis import ensure, entropy_correlation, export, surprisal_correlation
from twell.analysis.activity.entropy import RELATIONS
from twell.analysis.summaries.built import is_current
from twell.workbench.errors import Missing
from twell.workbench.options import ExportOptions
from twell.workbench.run.store import Run


def partial(a: float, b: float, both: float) -> float:
    return (a - b * both) / np.sqrt((1 - b**2) * (1 - both**2))


def given(y: pd.Series, x: pd.Series, other: pd.Series) -> float:
    """Return the partial rank correlation by its definition: of residuals of ranks."""
    *ranks, line = (each.rank().to_numpy() for each in (y, x, other))
    left = [each - np.polyval(np.polyfit(line, each, 1), line) for each in ranks]
    return float(np.corrcoef(*left)[0, 1])


def test_estimates_are_those_of_exact_values(run: Run, rows: pd.DataFrame) -> None:
    table = entropy_correlation(run).set_index(["of", "layer"])
    there = rows[(rows["flags"] == 0) & rows["loss"].notna()]
    assert len(table) == len(RELATIONS) * run.layers
    assert (table["n"] == len(there)).all()
    assert table.loc["loss", "spearman"].tolist() == surprisal_correlation(run)["spearman"].tolist()
    assert table.loc["loss", "low"].tolist() == surprisal_correlation(run)["low"].tolist()
    loss, entropy = there["loss"], there["entropy"]
    for layer in range(run.layers):
        for of, exact in (
            ("entropy", stats.spearmanr(there[layer], entropy).statistic),
            ("entropy given loss", given(there[layer], entropy, loss)),
            ("loss given entropy", given(there[layer], loss, entropy)),
        ):
            assert table.loc[(of, layer), "spearman"] == pytest.approx(exact, abs=0.006), (of, layer)


@pytest.mark.parametrize(("of", "order"), [("entropy given loss", "nel"), ("loss given entropy", "nle")])
def test_intervals_are_over_groups_of_documents(run: Run, rows: pd.DataFrame, of: str, order: str) -> None:
    """Of the partial correlations, anew without each group; from classes of nnz n, of entropy e and of loss l."""
    there = rows[(rows["flags"] == 0) & rows["loss"].notna()]
    nnz = there[2]
    classes = pd.DataFrame(
        {
            "n": nnz.where(nnz < 8, np.floor(np.sqrt(8 * nnz))),
            "e": np.floor(6 * np.sqrt(there["entropy"])),
            "l": np.floor(6 * np.sqrt(there["loss"])),
        }
    )
    by = {pair: kept(classes["n"], lambda n: n if n < 8 else np.floor(np.sqrt(8 * n)), classes[pair]) for pair in "el"}
    alike = [len(there) ** 2 - np.mean(each.map(each.value_counts()) ** 2) for each in (classes["e"], classes["l"])]
    both = np.sqrt(np.prod(alike)) / len(there) ** 2  # of both ranks' variance, n²/12, classes keep all but a c²/12

    def statistic(some: pd.DataFrame) -> float:
        y, x, other = (some[name] for name in order)
        a, b, between = (stats.spearmanr(*pair).statistic for pair in ((y, x), (y, other), (x, other)))
        return float(np.arctanh(partial(a / by[order[1]], b / by[order[2]], between / both)))

    row = entropy_correlation(run).set_index(["of", "layer"]).loc[(of, 2)]
    assert row["spearman"] == pytest.approx(np.tanh(statistic(classes)), rel=1e-6)
    ends = correlation_interval(there["document"] % 20, statistic, classes)
    assert (row["low"], row["high"]) == pytest.approx(ends, rel=1e-5)


@pytest.mark.parametrize("followed", ["entropy", "loss"])
def test_what_nnz_follows_is_told_from_what_goes_with_it(made: ModuleType, tmp_path: Path, followed: str) -> None:
    """Where nnz follows one of the two alone, it goes with the other too, but not given the one that it follows."""
    rng = np.random.default_rng(4)

    def change(columns: dict[str, Any]) -> dict[str, Any]:
        mask = columns["loss"].mask
        expected = rng.normal(size=len(mask))
        lost = 0.7 * expected + np.sqrt(1 - 0.7**2) * rng.normal(size=len(mask))
        firing = 0.5 * (expected if followed == "entropy" else lost) + rng.normal(size=len(mask))
        columns["entropy"] = np.ma.masked_array(np.exp(0.3 + 0.5 * expected).astype(np.float32), mask)
        columns["loss"] = np.ma.masked_array(np.exp(0.3 + 0.5 * lost).astype(np.float16), mask)
        for name in ("nnz_00", "nnz_01"):
            columns[name] = np.rint(60 * np.exp(0.5 * firing)).astype(np.uint16)
        return columns

    run = made.make(tmp_path / "planted", layers=2, sequences=400, change=change)
    table = entropy_correlation(run).query("layer == 1").set_index("of")
    other = {"entropy": "loss", "loss": "entropy"}[followed]
    truth = {followed: 0.5 / np.sqrt(1.25), other: 0.7 * 0.5 / np.sqrt(1.25), f"{other} given {followed}": 0.0}
    truth[f"{followed} given {other}"] = partial(truth[followed], truth[other], 0.7)
    for of, pearson in truth.items():
        assert table["spearman"][of] == pytest.approx(6 / np.pi * np.arcsin(pearson / 2), abs=0.025), of
    beside, alone = table.loc[f"{other} given {followed}"], table.loc[f"{followed} given {other}"]
    assert beside["low"] < 0.02 and beside["high"] > -0.02 and beside["high"] - beside["low"] < 0.08
    assert alone["low"] > 0.25 and table["low"][other] > 0.2


def of_before(run: Run, parts: slice) -> Run:
    """Take the column from some parts of the rows, as runs of before it was declared have none."""
    for path in run.parts("activity")[parts]:
        pq.write_table(pq.ParquetFile(path).read().drop(["entropy"]), path)
    return relisted(run, "activity")


def test_a_run_of_before_it_was_recorded(made: ModuleType, questions: ModuleType, tmp_path: Path) -> None:
    """It answers all else as one of today does, names what would record it, and needs no summaries built anew."""
    today = made.make(tmp_path / "today", sequences=60)
    ensure(today)
    run = of_before(made.make(tmp_path / "before", sequences=60), slice(None))
    assert "entropy" not in pq.ParquetFile(run.parts("activity")[0]).schema_arrow.names
    ensure(run)
    assert not run.summary_path("entropy_ranks").exists()
    assert is_current(run, scored=True)
    with pytest.raises(
        Missing, match="entropy was not recorded, as `twell capture MODEL --text SOURCE --out DIR` does"
    ):
        entropy_correlation(run)
    for name, question in questions.QUESTIONS.items():
        if name != "entropy_correlation":
            pd.testing.assert_frame_equal(question(run), question(today), obj=name)
    frame = run.activity()
    assert frame["entropy"].isna().all()
    assert frame.drop(columns="entropy").equals(today.activity().drop(columns="entropy"))
    (exported,) = export(ExportOptions(run=run.path, table=("activity",), out=tmp_path / "activity.csv"))
    assert len(exported.read_text().splitlines()) == 1 + run.manifest.tokens


def test_a_run_that_went_on_since(made: ModuleType, tmp_path: Path) -> None:
    """Parts of before and of today: what is known of some tokens alone is not said of all."""
    run = of_before(made.make(tmp_path / "resumed", sequences=60, of_document=7), slice(1))
    with pytest.raises(Missing, match=r"holds the entropy of [\d,]+ of [\d,]+ predictions, as older parts lack it"):
        entropy_correlation(run)
    rows = run.activity(flagged=False).dropna(subset="loss")
    known = int(rows["entropy"].notna().sum())
    assert 0 < known < len(rows)
    with pytest.raises(Missing, match=f" {known:,} of {len(rows):,} "):
        entropy_correlation(run)


def test_without_losses(made: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="not with --no-loss"):
        entropy_correlation(made.make(tmp_path / "bare", sequences=8, loss=False, parts=1))
