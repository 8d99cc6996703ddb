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
from twell.analysis.speed.ffn_speedup import caveats, conditions, layer_names, sentence
from twell.analysis.speed.speedup import geometric
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


def test_few_turns_of_a_busy_machine_are_said_to_be_too_few(run: Run) -> None:
    busy, words = (
        ffn_speedup(run) | {"busy": "the machine was busy"},
        "of so few the interval holds nearer 90 % than 95",
    )
    assert [words in caveats(busy | {"turns": turns})[-1] for turns in (1, 2, 19, 20)] == [False, True, True, False]


def test_an_unsteady_clock_is_named_by_nine_readings_in_ten(made: ModuleType, tmp_path: Path) -> None:
    """One reading of 100 MHz is a dip; a fifth of them at 1,500 beside 1,700 is another clock."""

    def change(table: Table, low: float, one_in: int) -> Table:
        count = len(table["batch"])
        return {**table, "sm_mhz": np.where(np.arange(count) % one_in == 3, low, 1700).astype(np.float32)}

    dips = made.make(tmp_path / "dips", sequences=10, parts=1, change_timings=lambda table: change(table, 100, 30))
    moved = made.make(tmp_path / "moved", sequences=10, parts=1, change_timings=lambda table: change(table, 1500, 5))
    assert ffn_speedup(dips)["busy"] == ""
    assert ffn_speedup(moved)["busy"] == "the GPU's clock moved between 1500 and 1700 MHz"


def test_conditions_name_the_rows_that_times_are_brought_to(run: Run) -> None:
    rows = run.frame("timings")
    size = np.median(rows.loc[rows["op"] == "ffn_sparse", "tokens"])
    assert conditions(run) == f"{size:,.0f} rows a batch, {run.manifest.dtype}, on {run.manifest.device}"
    assert conditions(run, "no such operation").startswith("an unknown number of rows a batch, ")


def test_more_than_ten_turns_are_taken_in_ten_blocks() -> None:
    """Of 23 turns in a row: three blocks of three, seven of two."""
    logs = np.random.default_rng(3).normal(0.5, 0.1, 23)
    means = [block.mean() for block in np.split(logs, [3, 6, 9, 11, 13, 15, 17, 19, 21])]
    half = stats.t.ppf(0.975, 9) * stats.sem(means)
    assert geometric(np.exp(logs)) == pytest.approx(np.exp([logs.mean(), logs.mean() - half, logs.mean() + half]))


@pytest.mark.parametrize(("alike", "least"), [(0.0, 0.93), (0.2, 0.92), (0.4, 0.9)])
def test_an_interval_holds_the_truth_where_turns_in_a_row_are_alike(alike: float, least: float) -> None:
    """Sixty turns that correlate with the next: taken as independent, 95, 89 and 80 % of the intervals held it."""
    noise = np.random.default_rng(5).normal(size=(110, 1500))
    for turn in range(1, len(noise)):
        noise[turn] += alike * noise[turn - 1]
    ends = np.array([geometric(np.exp(0.1 * turns))[1:] for turns in noise[50:].T])
    assert least < ((ends[:, 0] < 1) & (ends[:, 1] > 1)).mean() < 0.97


@pytest.mark.parametrize(
    ("kernel", "microseconds", "short"), [("hopper", 250.0, True), ("hopper", 350.0, False), ("cpu", 250.0, False)]
)
def test_calls_that_are_short_are_named(
    kernel: str, microseconds: float, short: bool, made: ModuleType, tmp_path: Path
) -> None:
    """Dense calls of 0.25 ms on a GPU, but not on a CPU, which has nobody to wait for."""

    def change(table: Table) -> Table:
        op = np.asarray(table["op"])
        took = np.where(op == "ffn_dense", microseconds, np.asarray(table["microseconds"]))
        took[np.argmax(op == "ffn_dense")] = 1e6  # a call that waited for something else
        return {**table, "microseconds": took, "kernel": np.where(op == "ffn_dense", "dense", kernel).tolist()}

    total = ffn_speedup(made.make(tmp_path / "short", sequences=10, parts=1, change_timings=change))
    assert total["short"] == pytest.approx(250.0 if short else np.nan, nan_ok=True)
    assert ("A dense FFN took 0.25 ms: beside calls this short" in sentence(total)) == short
