"""Speedup against numpy on the timings as written."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy import stats

from twell.analysis import (
    by_layer,
    compare_runs,
    model_speedup,
    overview,
    speedup,
    speedup_correlation,
    timings_by_batch,
)
from twell.analysis.speed.speedup import is_scaled, over_batches, rows_timed, sizes
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


def test_speedup(run: Run) -> None:
    table = speedup(run)
    timings = run.frame("timings")
    assert list(table["layer"]) == list(range(run.layers))
    for row in table.itertuples():
        there = timings[timings["layer"] == row.layer].set_index("batch")
        dense = there.loc[there["op"] == "ffn_dense", "microseconds"]
        sparse = there.loc[there["op"] == "ffn_sparse", "microseconds"]
        assert row.dense_us == pytest.approx(np.median(dense), rel=1e-12)
        assert row.sparse_us == pytest.approx(np.median(sparse), rel=1e-12)
        assert row.nnz_mean == pytest.approx(there["nnz_mean"].astype(float).mean(), rel=1e-9)
        logs = np.log(dense.to_numpy() / sparse.to_numpy())
        ends = stats.t.interval(0.95, 4, logs.mean(), logs.std(ddof=1) / np.sqrt(5))
        assert (row.speedup, row.low, row.high) == pytest.approx(tuple(np.exp([logs.mean(), *ends])), rel=1e-9)
        assert row.repeats == 5
        assert row.kernel == "cpu"
    assert table["gate_us"].isna().all()
    assert table.attrs["comparable"] is True


def test_rows_that_layers_were_timed_on(made: ModuleType, tmp_path: Path) -> None:
    """In batches that timed both, the first layer's too; times are scaled where they differ."""

    def longer(table: dict[str, Any]) -> dict[str, Any]:
        return table | {"tokens": np.where(table["layer"] == 0, 2 * table["tokens"], table["tokens"])}

    run = made.make(tmp_path / "one", sequences=10, parts=1, neurons=False, change_timings=longer)
    rows = run.frame("timings")
    timed = {op: set(of["tokens"]) for op, of in rows[rows["layer"] >= 0].groupby("op")}
    assert rows_timed(run) == {op: (min(timed[op]), max(timed[op])) for op in ("ffn_dense", "ffn_sparse")}
    assert is_scaled(run) == (len(timed["ffn_dense"] | timed["ffn_sparse"]) > 1)


def test_correlation(bos_run: Run) -> None:
    table, correlation = speedup(bos_run), speedup_correlation(bos_run)
    pearson = stats.pearsonr(table["nnz_mean"], table["speedup"])
    assert correlation["n"] == 8
    assert correlation["pearson"] == pytest.approx(pearson.statistic, rel=1e-9)
    assert correlation["spearman"] == pytest.approx(
        stats.spearmanr(table["nnz_mean"], table["speedup"]).statistic, rel=1e-9
    )
    interval = pearson.confidence_interval(0.95)
    assert (correlation["low"], correlation["high"]) == pytest.approx((interval.low, interval.high), rel=1e-9)
    orders = np.array(list(permutations(range(8))))
    x, y = (values - values.mean() for values in (table["nnz_mean"].to_numpy(), table["speedup"].to_numpy()))
    assert correlation["p"] == pytest.approx(np.mean(np.abs(y[orders] @ x) >= abs(x @ y) - 1e-9), rel=1e-12)
    assert correlation["method"] == "exact over all pairings"
    assert correlation["pearson"] < -0.8


def test_many_layers_use_students_t(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "deep", layers=13, sequences=10, parts=1, neurons=False)
    table, correlation = speedup(run), speedup_correlation(run)
    assert correlation["method"] == "Student's t"
    assert correlation["p"] == pytest.approx(stats.pearsonr(table["nnz_mean"], table["speedup"]).pvalue, rel=1e-9)


def test_the_reference_claims_no_speedup(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "slow", kernel="reference", sequences=10, parts=1)
    sentence = "the reference kernel is an oracle, not a fast kernel: no speedup is claimed from it"
    table = speedup(run)
    assert table.attrs["comparable"] is False
    assert table.attrs["note"] == sentence
    correlation = speedup_correlation(run)
    assert (correlation["comparable"], correlation["note"]) == (False, sentence)
    numbers = overview(run)
    assert numbers["speedup"] is None
    assert numbers["pearson"] is None
    assert numbers["missing"]["speedup"].lower().startswith(sentence[:20])


def test_few_layers(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "one", layers=1, sequences=10, parts=1)
    assert len(speedup(run)) == 1
    with pytest.raises(Missing, match="at least 4"):
        speedup_correlation(run)


def test_without_timings(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "untimed", timings=0, sequences=10, parts=1)
    for question in (speedup, speedup_correlation, timings_by_batch):
        with pytest.raises(Missing, match="timings"):
            question(run)


def test_dense_alone_is_no_speedup(made: ModuleType, tmp_path: Path) -> None:
    def dense(table):
        return {name: values[table["op"] == "ffn_dense"] for name, values in table.items()}

    with pytest.raises(Missing, match="both dense and sparse"):
        speedup(made.make(tmp_path / "dense", sequences=10, parts=1, change_timings=dense))


def test_timings_without_nnz_take_the_runs(made: ModuleType, tmp_path: Path) -> None:
    def forget(table):
        return {**table, "nnz_mean": np.ma.masked_all(len(table["layer"]), np.float32)}

    run = made.make(tmp_path / "forgot", sequences=10, parts=1, change_timings=forget)
    np.testing.assert_allclose(speedup(run)["nnz_mean"], by_layer(run)["mean"], rtol=1e-12)


def test_a_batch_without_nnz_is_left_out_of_its_mean(made: ModuleType, tmp_path: Path) -> None:
    def forget(table):
        return {**table, "nnz_mean": np.ma.masked_array(table["nnz_mean"].astype(np.float32), table["batch"] == 2)}

    run = made.make(tmp_path / "some", sequences=10, parts=1, change_timings=forget)
    rows = run.frame("timings").query("op == 'ffn_sparse' and batch != 2").astype({"nnz_mean": float})
    np.testing.assert_allclose(speedup(run)["nnz_mean"], rows.groupby("layer")["nnz_mean"].mean(), rtol=1e-12)


def test_decode_is_not_mixed_in(made: ModuleType, tmp_path: Path) -> None:
    def decode(table):
        phase = np.where(table["batch"] == 0, 1, 0)
        slow = np.where(phase == 1, 1e6, table["microseconds"])
        return {**table, "phase": phase.astype(np.uint8), "microseconds": slow}

    table = speedup(made.make(tmp_path / "decode", sequences=10, parts=1, change_timings=decode))
    assert (table["repeats"] == 4).all()
    assert table["dense_us"].max() < 1000


def test_layers_timed_in_batches_of_other_sizes_are_compared_by_the_token(made: ModuleType, tmp_path: Path) -> None:
    """Twice the tokens in twice the time, every second batch, and each layer in its own: 0.2 and 0.1 µs a token."""

    def sized(table):
        keep = table["batch"] % table["layer"].max() == table["layer"] % 2
        table = {name: np.ma.asarray(values)[keep] for name, values in table.items()}
        tokens = np.where(table["batch"] % 2 == 0, 1024, 2048).astype(np.int32)
        each = np.where(table["op"] == "ffn_dense", 0.2, 0.1)
        return {**table, "tokens": tokens, "microseconds": tokens * each}

    run = made.make(tmp_path / "sized", layers=3, sequences=10, parts=1, timings=4, change_timings=sized)
    times = run.frame("timings")
    assert times.groupby("layer")["tokens"].median().nunique() == 2
    size = times.loc[times["op"] == "ffn_dense", "tokens"].median()
    table = speedup(run)
    np.testing.assert_allclose(table["dense_us"], 0.2 * size)
    np.testing.assert_allclose(table["sparse_us"], 0.1 * size)
    np.testing.assert_allclose(table["speedup"], 2.0)


def test_dense_layers_timed_on_fewer_rows_are_brought_to_those_of_the_sparse_ones(
    made: ModuleType, tmp_path: Path
) -> None:
    """A capture caps the rows of the dense ones alone. The whole model's times keep their own rows."""

    def capped(table):
        tokens = np.where(table["op"] == "ffn_dense", 512, 2048).astype(np.int32)
        table = {**table, "tokens": tokens, "microseconds": tokens * np.where(table["op"] == "ffn_dense", 0.2, 0.1)}
        whole = {"batch": 0, "layer": -1, "op": "model_dense", "microseconds": 9.0, "tokens": 700}
        return made.more_timings(table, [whole])

    run = made.make(tmp_path / "capped", layers=3, sequences=10, parts=1, change_timings=capped)
    assert sizes(run) == {"ffn_dense": 2048, "ffn_sparse": 2048, "model_dense": 700}
    table = speedup(run)
    np.testing.assert_allclose(table["dense_us"], 0.2 * 2048)
    np.testing.assert_allclose(table["speedup"], 2.0)


def test_timings_by_batch(run: Run) -> None:
    table = timings_by_batch(run)
    assert list(table.columns) == ["batch", "layer", "op", "microseconds", "nnz_mean", "kernel"]
    assert len(table) == 5 * run.layers * 2


def test_model_speedup(made: ModuleType, tmp_path: Path) -> None:
    """Against numpy; batches timed one way only are left out, and so is decode."""
    rng = np.random.default_rng(0)

    rows = [
        {
            "batch": batch,
            "layer": -1,
            "op": op,
            "microseconds": rng.uniform(50, 100),
            "watts": float(rng.uniform(300, 400)),
            "kernel": "dense" if op == "model_dense" else "cpu",
            "phase": int(batch == 3),
        }
        for batch in range(5)
        for op in ("model_dense", "model_sparse")
    ]

    def whole(table):
        return made.more_timings(table, rows[:-1])

    run = made.make(tmp_path / "whole", sequences=10, parts=1, change_timings=whole)
    times = run.frame("timings").query("layer == -1 and phase == 0 and batch < 3")
    dense, sparse = (times[times["op"] == op].set_index("batch") for op in ("model_dense", "model_sparse"))
    dense = dense.loc[sparse.index]
    result = model_speedup(run)
    ratio = dense["microseconds"] / sparse["microseconds"]
    assert result["repeats"] == len(ratio) == 3
    logs = np.log(ratio)
    half = stats.t.ppf(0.975, 2) * logs.std() / np.sqrt(3)
    expected = np.exp([logs.mean(), logs.mean() - half, logs.mean() + half])
    assert (result["speedup"], result["low"], result["high"]) == pytest.approx(tuple(expected))
    assert overview(run)["pass_speedup"] == compare_runs([run, run])["model_speedup"][0] == result["speedup"]
    watts = sparse["watts"].astype(float) / dense["watts"].astype(float)
    assert result["energy"] == pytest.approx((watts / ratio).median())
    assert (result["kernel"], result["comparable"]) == ("cpu", True)
    with pytest.raises(Missing, match="whole forward pass"):
        model_speedup(made.make(tmp_path / "layers", sequences=10, parts=1))


@pytest.mark.parametrize(
    ("least", "most", "words"),
    [
        (1, None, "one batch"),
        (1, 1, "one batch"),
        (1, 4, "one batch or more"),
        (3, 3, "median of 3 batches"),
        (3, 9, "median of 3 batches or more"),
    ],
)
def test_what_a_median_is_over(least: int, most: int | None, words: str) -> None:
    assert over_batches(least, most) == words
