"""`twell bench --training`: its figures are of whole steps, its gradients are held to float64, its rows are a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from twell.kernels.benchmark import training as benchmark
from twell.kernels.benchmark.operations import Operation
from twell.kernels.benchmark.synthetic import synthetic_ffn
from twell.kernels.benchmark.training import TRAIN_COMPILED, TRAIN_DENSE, bench_training
from twell.workbench.bench.command import bench
from twell.workbench.bench.options import BenchOptions
from twell.workbench.errors import UserError

SPARSE = Operation("train_sparse", "reference", 8)


@pytest.mark.parametrize("plain", [False, True])
def test_a_step_computes_every_gradient(plain: bool) -> None:
    ffn, x = synthetic_ffn("even", 40, 64, 128, nnz=9, dtype=torch.float32, device="cpu", plain=plain)
    result = bench_training(ffn, x, compiled=False, seconds=0.001)
    assert list(result.times) == [TRAIN_DENSE, SPARSE]
    assert all(len(times) == benchmark.MIN_TURNS for times in result.times.values())
    assert 0 < result.errors[SPARSE][0] <= result.errors[SPARSE][1] < 1e-4
    assert result.errors[SPARSE][0] < 3 * result.errors[TRAIN_DENSE][0]
    assert result.nnz_mean == pytest.approx(9, rel=0.3)
    assert result.peak_bytes == {}, "a CPU does not count"


def test_a_wrong_gradient_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    ffn, x = synthetic_ffn("even", 40, 64, 128, nnz=9, dtype=torch.float32, device="cpu")
    right = benchmark.train_gated_ffn

    def wrong(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, **more: Any) -> Any:
        return right(x, gate, 1.01 * up, down, **more)

    monkeypatch.setattr(benchmark, "train_gated_ffn", wrong)
    assert bench_training(ffn, x, compiled=False, seconds=0.001).errors[SPARSE][0] > 1e-3


def test_a_compiler_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        def call(*_: Any) -> Any:
            raise RuntimeError("no compiler here\nand more")

        return call

    monkeypatch.setattr(torch, "compile", failing)
    ffn, x = synthetic_ffn("even", 20, 64, 128, nnz=9, dtype=torch.float32, device="cpu")
    result = bench_training(ffn, x, seconds=0.001)
    assert result.left_out == {TRAIN_COMPILED.op: "no compiler here"}
    assert TRAIN_COMPILED not in result.times


def test_its_rows_are_of_the_bench_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.parquet"
    given: dict[str, Any] = {"shape": "64,128", "rows": "24", "nnz": "9", "inputs": "even", "device": "cpu"}
    rows = bench(BenchOptions(**given, training=True, compile=False, seconds=0.001, out=out))
    assert [(row["op"], row["kernel"], row["metric"]) for row in rows] == [
        (op, kernel, metric)
        for op, kernel in (("train_dense", "torch"), ("train_sparse", "reference"))
        for metric in ("microseconds", "error_mean", "error_max")
    ]
    assert {row["case"] for row in rows} == {"training, even nnz 9, 24 rows"}
    assert pq.read_table(out).num_rows == len(rows)
    printed = capsys.readouterr().out
    assert "reference: the backward pass is dense, in torch" in printed
    assert "1.00" in printed


def test_recorded_patterns_of_many_rows_are_refused(tmp_path: Path) -> None:
    import numpy as np

    path = tmp_path / "patterns_d64_f128.npz"
    np.savez(path, nnz_0=np.ones(100, int), idx_0=np.zeros(100, int))
    with pytest.raises(UserError, match="Expected at most d_model / 2 rows of a recorded pattern for --training"):
        bench(BenchOptions(patterns=path, rows="100", device="cpu", training=True, compile=False))
