"""The one FFN speedup of a run: sums over named layers, its interval over turns, and what must stand beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats

from twell.analysis import compare_runs, ffn_speedup, overview, speedup
from twell.analysis.speed.ffn_speedup import caveats, layer_names, sentence
from twell.workbench.run.store import Run

Table = dict[str, Any]


def test_the_sum_over_layers_and_its_interval_over_turns(run: Run) -> None:
    total = ffn_speedup(run)
    sums = run.frame("timings").groupby(["batch", "op"])["microseconds"].sum().unstack()
    logs = np.log(sums["ffn_dense"] / sums["ffn_sparse"])
    low, high = stats.t.interval(0.95, len(logs) - 1, logs.mean(), stats.sem(logs))
    assert (total["low"], total["high"]) == pytest.approx((np.exp(low), np.exp(high)))
    assert total["speedup"] == pytest.approx(np.sqrt(total["low"] * total["high"])), "of the statistic of its interval"
    assert (total["turns"], total["all_layers"], layer_names(total)) == (5, True, f"all {run.layers} layers")
    assert total["low"] < total["speedup"] < total["high"] and total["tells"]
    assert caveats(total) == []


def timed(made: ModuleType, tmp_path: Path, keep: Callable[[Table], Any], **changes: Any) -> Run:
    """A run of 6 layers that keeps some rows of its timings, with some columns set."""

    def change(table: Table) -> Table:
        rows = {name: np.ma.asarray(values)[keep(table)] for name, values in table.items()}
        return rows | {name: np.full(len(rows["batch"]), value, np.float32) for name, value in changes.items()}

    return made.make(tmp_path / "timed", layers=6, sequences=10, parts=1, change_timings=change)


def test_layers_are_named_unless_they_are_all(made: ModuleType, tmp_path: Path) -> None:
    total = ffn_speedup(run := timed(made, tmp_path, lambda table: np.isin(table["layer"], [0, 3, 4, 5])))
    assert layer_names(total) == "layers 0, 3-5 alone"
    assert "layers 0, 3-5 alone" in sentence(total)
    assert overview(run)["speedup_layers"] == "layers 0, 3-5 alone"
    assert "FFN × is of layers 0, 3-5 alone." in compare_runs([run, run]).attrs["speed_notes"][0]


def test_one_turn_tells_no_spread(made: ModuleType, tmp_path: Path) -> None:
    total = ffn_speedup(run := timed(made, tmp_path, lambda table: np.asarray(table["batch"]) == 0))
    sums = speedup(run)[["dense_us", "sparse_us"]].sum()
    assert total["speedup"] == pytest.approx(sums["dense_us"] / sums["sparse_us"])
    assert np.isnan(total["low"]) and total["turns"] == 1
    assert "Timed once" in sentence(total) and "95 %" not in sentence(total)


def test_turns_that_differ_too_much_tell_nothing(made: ModuleType, tmp_path: Path) -> None:
    def change(table: Table) -> Table:
        slow = (np.asarray(table["op"]) == "ffn_sparse") & (np.asarray(table["batch"]) % 2 == 0)
        return {**table, "microseconds": np.where(slow, np.asarray(table["microseconds"]) * 30, table["microseconds"])}

    total = ffn_speedup(made.make(tmp_path / "noisy", sequences=10, parts=1, change_timings=change))
    assert total["low"] < 1 < total["high"] and not total["tells"]
    assert "does not tell sparse from dense" in sentence(total)


@pytest.mark.parametrize(
    ("column", "value", "words"), [("load", 3.0, "busy (load 3.0 per core)"), ("load", 1.0, ""), ("sm_mhz", 1700.0, "")]
)
def test_a_busy_machine_is_named(column: str, value: float, words: str, made: ModuleType, tmp_path: Path) -> None:
    total = ffn_speedup(timed(made, tmp_path, lambda table: np.full(len(table["batch"]), True), **{column: value}))
    assert (words in sentence(total)) and bool(total["busy"]) == bool(words)


@pytest.mark.parametrize(
    ("kernel", "microseconds", "short"), [("hopper", 250.0, True), ("hopper", 350.0, False), ("cpu", 250.0, False)]
)
def test_calls_too_short_for_the_host_are_named(
    kernel: str, microseconds: float, short: bool, made: ModuleType, tmp_path: Path
) -> None:
    """Dense calls of 0.25 ms on a GPU, but not on a CPU, which has nobody to wait for."""

    def change(table: Table) -> Table:
        op = np.asarray(table["op"])
        took = np.where(op == "ffn_dense", microseconds, np.asarray(table["microseconds"]))
        return {**table, "microseconds": took, "kernel": np.where(op == "ffn_dense", "dense", kernel).tolist()}

    total = ffn_speedup(made.make(tmp_path / "short", sequences=10, parts=1, change_timings=change))
    assert (total["short"] == 250) == short
    assert ("A dense FFN took 0.25 ms: of calls this short" in sentence(total)) == short
