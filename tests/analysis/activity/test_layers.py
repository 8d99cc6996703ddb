"""Layers against numpy on the rows themselves."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.questions import degrees

from twell.analysis import by_layer, layer_histogram
from twell.analysis.activity.layers import _waking
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


def test_by_layer(run: Run, rows: pd.DataFrame, used: pd.DataFrame, flagged: bool) -> None:
    table = by_layer(run, flagged=flagged)
    layers = list(range(run.layers))
    counts = used[layers]
    assert list(table["layer"]) == layers
    assert (table["tokens"] == len(used)).all()
    for name, expected in {
        "mean": counts.mean(),
        "sd": counts.std(ddof=0),
        "sparsity": 1 - counts.mean() / run.d_ff,
        "share": counts.sum() / counts.sum().sum(),
    }.items():
        np.testing.assert_allclose(table[name], expected, rtol=1e-9, err_msg=name)
    for name, share in {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}.items():
        exact = np.quantile(counts.to_numpy(), share, axis=0, method="inverted_cdf")
        assert list(table[name]) == list(exact), name
    assert list(table["max"]) == list(counts.max())
    fired = run.frame("neurons").groupby("layer")["neuron"].nunique()
    assert list(table["dead"]) == list(run.d_ff - fired)
    np.testing.assert_allclose(table["dead_share"], 1 - fired / run.d_ff, rtol=1e-9)
    unflagged = int((rows["flags"] == 0).sum())
    np.testing.assert_allclose(table["dead_upper"], 3 / unflagged, rtol=1e-12)
    np.testing.assert_allclose(table["dead_sequences"], 3 / run.manifest.sequences, rtol=1e-12)
    np.testing.assert_allclose(table["dead_documents"], 3 / rows["document"].nunique(), rtol=1e-12)
    by_neuron = run.frame("neurons").groupby(["layer", "neuron"])["fires"].sum()
    once, twice = ((by_neuron == n).groupby("layer").sum() for n in (1, 2))
    assert list(table["dead_waking"]) == list(np.minimum(once * (once - 1) / (2 * (twice + 1)), run.d_ff - fired))
    assert f"{unflagged:,}" in table.attrs["note"]
    waking, dead = round(table["dead_waking"].sum()), int(table["dead"].sum())
    said = f"would wake at least about {waking:,} of the {dead:,}" if waking else f"would wake any of the {dead:,}"
    assert said in table.attrs["note"]
    assert "would wake any of the 7 (" in _waking(0, 7) and "at least about 2 of the 7 (" in _waking(2, 7)
    assert table.attrs["definition"] == run.manifest.nnz_definition
    left_out = f"({len(rows) - unflagged:,} of {len(rows):,} in {run.name})"
    assert table.attrs["counted"] == "every token of the run" if flagged else left_out in table.attrs["counted"]


def test_rare_neurons_that_fire_in_bursts_are_not_said_to_stay_dead() -> None:
    """Of 400 some 160 are silent in 100 documents, most of which ten times the text wakes; none has fired just once."""
    rng = np.random.default_rng(0)
    chance = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), 400))
    documents = rng.binomial(100, chance)
    fires = documents + rng.poisson(19 * documents)
    woken = rng.binomial(1000, chance)[documents == 0] > 0
    assert woken.mean() > 0.8 and not (fires == 1).sum() > 1
    note = _waking(0, len(woken))
    assert "does not tell whether more such text would wake any" in note and "nothing says" not in note


def test_bounds_of_a_short_run_are_shares(made: ModuleType, tmp_path: Path) -> None:
    """Three over one sequence, or over one token, would be 300 %."""
    table = by_layer(made.make(tmp_path / "short", sequences=1, length=2, parts=1, timings=0))
    assert (table[["dead_upper", "dead_sequences", "dead_documents"]] == 1).all(axis=None)
    assert "on 1 unflagged token of 1 sequence, so" in table.attrs["note"]
    assert "in less than 100 % of sequences" in table.attrs["note"]
    assert "on less than 100 % of tokens" in table.attrs["note"]


def test_interval_of_the_mean(run: Run, rows: pd.DataFrame) -> None:
    """Each of twenty groups of documents left out once."""
    plain, table = rows[rows["flags"] == 0], by_layer(run)
    t = stats.t.ppf(0.975, degrees(plain["document"] % 20))
    for layer in range(run.layers):
        groups = [plain.loc[plain["document"] % 20 != group, layer].mean() for group in range(20)]
        half = t * np.sqrt(19 / 20 * ((np.array(groups) - plain[layer].mean()) ** 2).sum())
        assert table["high"][layer] - table["mean"][layer] == pytest.approx(half, rel=1e-9)
        assert table["mean"][layer] - table["low"][layer] == pytest.approx(half, rel=1e-9)
    assert by_layer(run, flagged=True)[["low", "high"]].isna().all(axis=None)


def test_histogram_is_exact(run: Run, used: pd.DataFrame, flagged: bool) -> None:
    table = layer_histogram(run, flagged=flagged)
    long = used.melt(value_vars=list(range(run.layers)), var_name="layer", value_name="nnz")
    expected = long.groupby(["layer", "nnz"]).size()
    assert list(zip(table["layer"], table["nnz"], strict=True)) == [(a, int(b)) for a, b in expected.index]
    assert list(table["tokens"]) == list(expected)


def test_used(made: ModuleType, tmp_path: Path, flagged: bool) -> None:
    """A model with a ReLU on the up branch too: how many of what fires is used."""
    run = made.make(tmp_path / "two", sequences=12, parts=2, up_relu=True)
    rows = run.frame("activity")
    rows = rows if flagged else rows[rows["flags"] == 0]
    expected = [rows[name].astype(float).mean() for name in ("used_00", "used_01", "used_02", "used_03")]
    np.testing.assert_allclose(by_layer(run, flagged=flagged)["used"], expected, rtol=1e-9)


def test_used_is_empty_where_all_that_fires_is_used(run: Run) -> None:
    assert by_layer(run)["used"].isna().all()


def test_flagged_tokens_make_a_difference(run: Run) -> None:
    assert (by_layer(run, flagged=True)["mean"] > by_layer(run)["mean"]).all()


def test_without_neuron_sums_the_rest_is_there(made: ModuleType, tmp_path: Path) -> None:
    table = by_layer(made.make(tmp_path / "counts", neurons=False, sequences=10, parts=1))
    assert table["dead"].isna().all()
    assert table["dead_share"].isna().all()
    assert table["mean"].gt(0).all()


def test_one_layer(made: ModuleType, tmp_path: Path) -> None:
    table = by_layer(made.make(tmp_path / "one", layers=1, sequences=10, parts=1))
    assert len(table) == 1
    assert table["share"].item() == 1


def test_a_run_of_flagged_tokens_only(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "first", sequences=3, parts=1, length=2, neurons=False, timings=0)
    rows = run.frame("activity")
    assert (rows["flags"] == 0).sum() == 3  # positions 1
    table = by_layer(run)
    assert (table["tokens"] == 3).all()

    def only_first(columns: dict[str, Any]) -> dict[str, Any]:
        return {name: values[columns["position"] == 0] for name, values in columns.items()}

    only = made.make(tmp_path / "only", sequences=4, parts=1, neurons=False, timings=0, change=only_first)
    with pytest.raises(Missing, match="flagged=True"):
        by_layer(only)
    assert (by_layer(only, flagged=True)["tokens"] == 4).all()
