"""The headline numbers against the tables and the rows."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from twell.analysis import by_token, overview, speedup
from twell.workbench.run.store import Run


def test_overview(run: Run, rows: pd.DataFrame, made: ModuleType) -> None:
    found = overview(run)
    layers = list(range(run.layers))
    plain = rows[rows["flags"] == 0]
    means = plain[layers].mean()
    assert found["missing"] == {}
    assert found["tokens"] == len(plain)
    assert found["flagged_tokens"] == len(rows) - len(plain) > 0
    assert found["sequences"] == rows["sequence"].nunique()
    assert found["nnz_mean"] == pytest.approx(means.mean(), rel=1e-9)
    assert found["sparsity"] == pytest.approx(1 - means.mean() / run.d_ff, rel=1e-9)
    assert (found["densest_layer"], found["sparsest_layer"]) == (means.idxmax(), means.idxmin())
    assert found["densest_nnz"] == pytest.approx(means.max(), rel=1e-9)
    assert found["sparsest_nnz"] == pytest.approx(means.min(), rel=1e-9)
    dead = run.layers * run.d_ff - run.frame("neurons").groupby(["layer", "neuron"]).ngroups
    assert found["dead"] == dead
    assert found["dead_share"] == pytest.approx(dead / (run.layers * run.d_ff), rel=1e-12)
    assert found["loss"] == pytest.approx(rows["loss"].mean(), rel=1e-9)
    assert found["loss_tokens"] == rows["loss"].notna().sum()
    first = rows[(rows["position"] == 0) & (rows["flags"] < 4)][layers].sum(axis=1)
    later = plain[plain["position"] > 0][layers].sum(axis=1)
    assert found["first_ratio"] == pytest.approx(first.mean() / later.mean(), rel=1e-9)
    assert found["first_tokens"] == len(first)
    assert found["loudest"]["token_id"] == made.LOUD
    assert found["quietest"] == by_token(run).iloc[-1][["token_id", "text", "z", "z_se", "count"]].to_dict()
    times = speedup(run)
    assert found["speedup"] == pytest.approx(times["dense_us"].sum() / times["sparse_us"].sum(), rel=1e-12)
    assert found["kernel"] == "cpu"
    assert found["pearson_layers"] == 4


def test_a_poor_run_says_what_it_cannot_tell(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "poor", layers=1, sequences=4, length=8, parts=1, loss=False, neurons=False, timings=0)
    found = overview(run)
    assert found["tokens"] > 0
    assert found["dead"] is None
    assert {"loudest", "spearman", "speedup", "pearson"} <= set(found["missing"])
    assert all(found[name] is None for name in found["missing"])
    assert "--no-loss" in found["missing"]["spearman"]
    assert found["loss"] is None
