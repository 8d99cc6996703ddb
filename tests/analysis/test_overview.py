"""The headline numbers against the tables and the rows."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from twell.analysis import by_token, ffn_speedup, first_positions, overview
from twell.workbench.run.store import Run

PASS = ("pass_speedup", "pass_low", "pass_high", "pass_repeats")


def test_overview(run: Run, rows: pd.DataFrame, made: ModuleType) -> None:
    numbers = overview(run)
    layers = list(range(run.layers))
    plain = rows[rows["flags"] == 0]
    means = plain[layers].mean()
    assert set(numbers["missing"]) == {*PASS, "used_mean"}, "it times layers alone, and has one ReLU"
    assert numbers["tokens"] == len(plain)
    assert numbers["flagged_tokens"] == len(rows) - len(plain) > 0
    assert numbers["sequences"] == rows["sequence"].nunique()
    assert numbers["nnz_mean"] == pytest.approx(means.mean(), rel=1e-9)
    assert numbers["sparsity"] == pytest.approx(1 - means.mean() / run.d_ff, rel=1e-9)
    assert (numbers["densest_layer"], numbers["sparsest_layer"]) == (means.idxmax(), means.idxmin())
    assert numbers["densest_nnz"] == pytest.approx(means.max(), rel=1e-9)
    assert numbers["sparsest_nnz"] == pytest.approx(means.min(), rel=1e-9)
    dead = run.layers * run.d_ff - run.frame("neurons").groupby(["layer", "neuron"]).ngroups
    assert numbers["dead"] == dead
    assert numbers["dead_share"] == pytest.approx(dead / (run.layers * run.d_ff), rel=1e-12)
    assert numbers["loss"] == pytest.approx(rows["loss"].mean(), rel=1e-9)
    assert numbers["loss_tokens"] == rows["loss"].notna().sum()
    first = rows[(rows["position"] == 0) & (rows["flags"] < 4)][layers].sum(axis=1)
    later = plain[plain["position"] > 0][layers].sum(axis=1)
    assert numbers["first_ratio"] == pytest.approx(first.mean() / later.mean(), rel=1e-9)
    assert numbers["first_tokens"] == len(first)
    total = first_positions(run).query("layer == -1 and start == 'all'").iloc[0]
    assert (numbers["first_low"], numbers["first_high"]) == (total["low"], total["high"])
    assert numbers["first_low"] < numbers["first_ratio"] < numbers["first_high"]
    assert numbers["loudest"]["token_id"] == made.LOUD
    assert numbers["quietest"] == by_token(run).iloc[-1][["token_id", "text", "z", "z_se", "count"]].to_dict()
    assert numbers["speedup"] == ffn_speedup(run)["speedup"]
    assert numbers["kernel"] == "cpu"
    assert numbers["pearson_layers"] == 4


def test_a_poor_run_says_what_it_cannot_tell(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "poor", layers=1, sequences=4, length=8, parts=1, loss=False, neurons=False, timings=0)
    numbers = overview(run)
    assert numbers["tokens"] > 0
    assert numbers["dead"] is None
    assert {"loudest", "spearman", "speedup", "pearson"} <= set(numbers["missing"])
    assert all(numbers[name] is None for name in numbers["missing"])
    assert "--no-loss" in numbers["missing"]["spearman"]
    assert numbers["loss"] is None


def test_used_products(run: Run, made: ModuleType, tmp_path: Path) -> None:
    """Those of a model with a ReLU on the up branch too; None where there is none."""
    assert overview(run)["used_mean"] is None and "no ReLU on the up branch" in overview(run)["missing"]["used_mean"]
    both = made.make(tmp_path / "both", layers=3, sequences=20, up_relu=True)
    rows = both.activity(flagged=False)
    numbers = overview(both)
    assert numbers["used_mean"] == pytest.approx(rows[[f"used_{layer:02}" for layer in range(3)]].mean().mean())
    assert 0 < numbers["used_mean"] < numbers["nnz_mean"]
