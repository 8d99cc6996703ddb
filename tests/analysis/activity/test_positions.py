"""Positions against pandas on the rows themselves."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from twell.analysis import by_position, position_blocks
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run


@pytest.fixture
def placed(rows: pd.DataFrame, flagged: bool) -> pd.DataFrame:
    """Rows that count: unflagged ones, and position 0 unless it is not finite."""
    return rows if flagged else rows[(rows["flags"] == 0) | ((rows["position"] == 0) & (rows["flags"] < 4))]


def clustered(long: pd.DataFrame, mean: pd.Series) -> tuple[np.ndarray, np.ndarray]:
    """The standard error of each mean, and Kish's number of documents, by their definitions; NaN for one document."""
    inside = long.groupby(["position", "layer", "document"])["nnz"].agg(["size", "sum"])
    by = inside.index.droplevel("document")
    residual = inside["sum"] - inside["size"] * mean.reindex(by).to_numpy()
    squares = pd.DataFrame({"n": inside["size"], "n2": inside["size"] ** 2, "r2": residual**2})
    sums = squares.groupby(["position", "layer"]).sum().reindex(mean.index)
    k = (sums["n"] ** 2 / sums["n2"]).to_numpy()
    several = k > 1
    se = np.full(len(k), np.nan)
    se[several] = (np.sqrt(sums["r2"]) / sums["n"])[several] * np.sqrt(k[several] / (k[several] - 1))
    return se, np.where(k >= 2, k, np.nan)


@pytest.mark.parametrize("total", [False, True])
def test_by_position(run: Run, placed: pd.DataFrame, flagged: bool, total: bool) -> None:
    table = by_position(run, flagged=flagged, total=total)
    layers = list(range(run.layers))
    counts = placed[layers].sum(axis=1).to_frame(-1) if total else placed[layers]
    keys = ["position", "document"]
    long = counts.assign(**{name: placed[name] for name in keys}).melt(keys, var_name="layer", value_name="nnz")
    expected = long.groupby(["position", "layer"])["nnz"].agg(["size", "mean"])
    assert list(zip(table["position"], table["layer"], strict=True)) == list(expected.index)
    assert list(table["tokens"]) == list(expected["size"])
    np.testing.assert_allclose(table["mean"], expected["mean"], rtol=1e-9)
    if flagged:
        assert table[["se", "low", "high"]].isna().all(axis=None)
    else:
        se, k = clustered(long, expected["mean"])
        np.testing.assert_allclose(table["se"], se, rtol=1e-9, atol=1e-12)
        half = stats.t.ppf(0.975, k - 1) * se
        np.testing.assert_allclose(table["low"], expected["mean"] - half, rtol=1e-9)
        np.testing.assert_allclose(table["high"], expected["mean"] + half, rtol=1e-9)
        assert (k < expected["size"]).any(), "some documents have two sequences that reach a position"
    assert table["first"].equals(table["position"] == 0)
    assert table["first"].any()


def test_blocks_given(run: Run, rows: pd.DataFrame, placed: pd.DataFrame, flagged: bool) -> None:
    table = position_blocks(run, blocks=[0, 1, 5, 20, 999], flagged=flagged)
    last = int(placed["position"].max())
    assert sorted(set(zip(table["position_from"], table["position_to"], strict=True))) == [
        (0, 0),
        (1, 4),
        (5, 19),
        (20, last),
    ]
    for row in table.itertuples():
        there = placed[placed["position"].between(row.position_from, row.position_to)][row.layer]
        assert row.tokens == len(there)
        assert row.mean == pytest.approx(there.mean(), rel=1e-9)
        layer_mean = rows.loc[rows["flags"] == 0, row.layer].mean()
        assert row.relative == pytest.approx(there.mean() / layer_mean, rel=1e-9)


@pytest.mark.parametrize("blocks", [2, 3, 8, 24, 500])
def test_blocks_by_number(run: Run, blocks: int) -> None:
    table = position_blocks(run, blocks=blocks)
    spans = table[table["layer"] == 0][["position_from", "position_to"]].to_numpy()
    assert len(spans) <= blocks
    assert spans[0].tolist() == [0, 0]
    assert (spans[1:, 0] == spans[:-1, 1] + 1).all()
    assert table["tokens"].sum() == by_position(run)["tokens"].sum()


def test_planted_decay_is_there(run: Run) -> None:
    table = position_blocks(run, blocks=[0, 1, 20])
    relative = table.pivot(index="layer", columns="position_from", values="relative")
    assert (relative[0] > 2).all()
    assert (relative[20] < 1).all()


def test_special_first_tokens_stand_at_position_0(bos_run: Run) -> None:
    table = by_position(bos_run)
    assert (table[table["first"]]["tokens"] == 39).all(), "40 sequences, one of which begins with a token not finite"
    assert len(position_blocks(bos_run).query("position_from == 0")) == 8


def test_one_position(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "two", sequences=5, length=2, parts=1)
    assert sorted(set(by_position(run)["position"])) == [0, 1]
    assert by_position(run)["se"].notna().all()


@pytest.mark.parametrize(("documents", "nnz"), [(2, 7), (5, 7), (5, 0), (6, 7)])
def test_a_few_equal_counts_have_no_interval(made: ModuleType, tmp_path: Path, documents: int, nnz: int) -> None:
    """Of two documents or five; six that agree by chance would be a wonder. Layer 1 has the counts that were drawn."""

    def change(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {"nnz_00": np.where(columns["position"] == 3, nnz, columns["nnz_00"]).astype(np.uint16)}

    shape = {"sequences": 3 * documents, "of_document": 3, "length": 8, "layers": 2, "parts": 1}
    table = by_position(made.make(tmp_path / "alike", change=change, **shape)).set_index(["layer", "position"])
    alike, drawn = (table.loc[(layer, 3), ["se", "low", "high"]] for layer in (0, 1))
    assert table.loc[(0, 3), "mean"] == nnz and drawn["low"] < drawn["high"]
    assert alike.isna().all() if documents < 6 else list(alike) == [0, nnz, nnz]


@pytest.mark.parametrize("blocks", [1, [], [-3, 4]])
def test_impossible_blocks(run: Run, blocks: int | list[int]) -> None:
    with pytest.raises(UserError, match="Expected"):
        position_blocks(run, blocks=blocks)
