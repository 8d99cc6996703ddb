"""Benchmarks: turns alternate, slow comes out slow and wrong comes out wrong."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.fired_patterns import pattern_of
from torch import Tensor

from twell.kernels.backends import hopper, reference
from twell.kernels.benchmark import operations
from twell.kernels.benchmark import runner as benches
from twell.kernels.benchmark.operations import COMPILED, DENSE, FUSED, GATE, UP_DOWN, BenchRequest, Operation
from twell.kernels.benchmark.runner import bench, bench_packed
from twell.kernels.benchmark.synthetic import packed_pattern, synthetic_ffn
from twell.kernels.benchmark.timing import time_in_turns
from twell.kernels.dispatch import KERNELS, Kernel
from twell.kernels.layout import Layout, pack, unpack
from twell.kernels.modules import SparseFFN
from twell.kernels.ops import plain_ffn
from twell.kernels.params import FFNParams
from twell.kernels.stats import Stats

CPU = torch.device("cpu")
QUICK = BenchRequest(kernels=("reference",), compiled=False, seconds=0.001)
OURS = Operation("ffn_sparse", "planted", 8)


def test_every_turn_runs_everything_once_in_an_order_of_its_own() -> None:
    heard: list[str] = []
    took = time_in_turns({name: partial(heard.append, name) for name in "abcd"}, CPU, 20)
    each = [tuple(heard[at : at + 4]) for at in range(0, len(heard), 4)]
    assert len(each) == 21  # one turn is not timed
    assert all(sorted(turn) == list("abcd") for turn in each)
    assert len(set(each)) > 10
    assert [len(times) for times in took.values()] == [20] * 4


def test_a_gpu_is_timed_on_its_own_stream_whichever_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            recorded.append(stream)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return 2.5  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    took = time_in_turns({"one": lambda: recorded.append("run")}, torch.device("cuda", 1), 1, warm_up=False)
    assert took == {"one": [2500.0]}
    assert recorded == ["stream of cuda:1", "run", "stream of cuda:1"]


def test_a_cache_of_unknown_size_is_taken_for_a_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf_names", {"SC_LEVEL3_CACHE_SIZE": 194})
    for reported, expected in ((2**20, 2**20), (0, benches.CACHE), (-1, benches.CACHE)):
        monkeypatch.setattr(os, "sysconf", lambda _, reported=reported: reported)
        assert benches.cache_bytes(CPU) == expected


def plant(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[FFNParams], tuple[Tensor, Stats]], **about: Any
) -> BenchRequest:
    monkeypatch.setitem(KERNELS, "planted", Kernel(run, lambda *_: None, "planted", **about))
    return BenchRequest(kernels=("planted",), compiled=False, seconds=0.001)


@pytest.mark.alone
def test_a_slow_kernel_comes_out_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(params: FFNParams) -> tuple[Tensor, Stats]:
        time.sleep(0.02)
        return reference.run(params)

    ffn, x = synthetic_ffn("even", 64, 64, 128, nnz=10)
    result = bench(ffn, x, plant(monkeypatch, slow))
    assert len(result.times[OURS]) == benches.MIN_TURNS
    assert min(result.times[OURS]) > 20_000 > result.median(GATE)
    assert set(result.times) == {DENSE, FUSED, GATE, OURS}


def test_a_wrong_kernel_shows_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(params: FFNParams) -> tuple[Tensor, Stats]:
        y, stats = reference.run(params)
        y[0] *= 1.5
        return y * 1.01, stats

    ffn, x = synthetic_ffn("even", 100, 64, 128, nnz=20)
    errors = bench(ffn, x, plant(monkeypatch, wrong)).errors
    assert errors[OURS] == (pytest.approx(0.01 + 0.00505, rel=1e-3), pytest.approx(0.515, rel=1e-3))
    assert all(0 < largest < 1e-5 for key, (_, largest) in errors.items() if key != OURS)


@pytest.mark.alone
def test_cold_weights_are_rotated(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def look(params: FFNParams) -> tuple[Tensor, Stats]:
        seen.append(params.w_gate.data_ptr())
        time.sleep(0.01)
        return reference.run(params)

    ffn, x = synthetic_ffn("even", 2, 64, 128, nnz=20)
    size = sum(weight.nbytes for weight in ffn.parameters())
    monkeypatch.setattr(benches, "cache_bytes", lambda _: size)
    asked = plant(monkeypatch, look)
    bench(ffn, x, asked)
    assert len(set(seen)) == 1
    seen.clear()
    result = bench(ffn, x, BenchRequest(**{**vars(asked), "cold": True}))
    assert 10_000 < result.median(OURS) < 40_000  # of one call, whatever the number of sets
    assert len(set(seen)) == benches.CACHES + 1
    rotated = [tuple(seen[at : at + 5]) for at in range(1, len(seen), 5)]
    assert len(set(rotated)) == 1 and len(set(rotated[0])) == 5


def test_what_cannot_run_is_left_out_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = {"lacks": lambda asks: None if asks.layout.compression == 8 else "expected compression 8"}
    asked = plant(monkeypatch, reference.run, **lacks)
    asked = BenchRequest(**{**vars(asked), "kernels": ("hopper", "planted"), "layouts": (Layout(), Layout(256, 16))})
    ffn, x = synthetic_ffn("even", 300, 64, 256, nnz=20)
    result = bench(ffn, x, asked)
    assert result.left_out == {
        "hopper at compression 8": "expected device cuda, got cpu",
        "hopper at compression 16": "expected device cuda, got cpu",
        "planted at compression 16": "expected compression 8",
    }
    tiles = (x.double() @ ffn.w_gate.double().t() > 0).sum(1)
    assert result.fired.overflowing == {8: int((tiles > 31).sum()), 16: int((tiles > 15).sum())}
    assert result.fired.nnz_mean == pytest.approx(float(tiles.double().mean()))


def test_compiled_runs_and_is_left_out_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = BenchRequest(**{**vars(QUICK), "compiled": True})
    ffn, x = synthetic_ffn("even", 24, 64, 128, nnz=20, plain=True)
    eager = partial(torch.compile, backend="eager")  # what is traced is real; the C++ compiler would take seconds
    monkeypatch.setattr(operations.torch, "compile", eager)
    operations._compiled.cache_clear()
    result = bench(ffn, x, asked)
    assert result.errors[COMPILED] == result.errors[DENSE] and FUSED not in result.times

    def broken(*_: Any, **__: Any) -> Callable[..., Tensor]:
        def fail(*_: Any) -> Tensor:
            raise RuntimeError("no compiler here\nsecond line")

        return fail

    monkeypatch.setattr(operations.torch, "compile", broken)
    operations._compiled.cache_clear()
    result = bench(ffn, x, asked)
    operations._compiled.cache_clear()
    assert result.left_out["ffn_compiled"] == "no compiler here" and COMPILED not in result.times


def test_probes_are_timed_beside_the_kernel() -> None:
    ffn, x = synthetic_ffn("even", 24, 64, 128, nnz=20)
    asked = BenchRequest(kernels=("cpu",), layouts=(Layout(256, 4),), compiled=False, probes=True, seconds=0.001)
    ours = {key.op for key in bench(ffn, x, asked).times if key == Operation(key.op, "cpu", 4)}
    assert ours == {"ffn_sparse", "ffn_counts", "ffn_neurons", "ffn_packed"}


@pytest.mark.parametrize("biased", [(), ("b_gate", "b_up", "b_down"), ("b_up",)])
def test_baselines_compute_any_ffn(biased: tuple[str, ...]) -> None:
    ffn, x = synthetic_ffn("even", 30, 64, 128, nnz=20)
    sizes = {"b_gate": 128, "b_up": 128, "b_down": 64}
    drawn = torch.Generator().manual_seed(1)  # a row whose sums cancel has larger errors
    biases = {name: torch.randn(sizes[name], generator=drawn) for name in biased}
    options: dict[str, Any] = {"activation": "relu2", "up_relu": True, "kernel": "cpu"}
    other = SparseFFN(ffn.w_gate, ffn.w_up, ffn.w_down, **biases, **options)
    result = bench(other, x, BenchRequest(compiled=False, seconds=0.001))
    assert set(result.errors) == {DENSE, FUSED, *(Operation("ffn_sparse", name, 8) for name in ("cpu", "reference"))}
    assert all(largest < 1e-5 for _, largest in result.errors.values())
    twin = operations.sibling(other, "reference", torch.float64)  # what errors are told from
    wide, parts = x.double(), (("b_gate", ffn.w_gate), ("b_up", ffn.w_up))
    gate, up = (wide @ weight.double().t() + biases.get(name, 0) for name, weight in parts)
    expected = (gate.relu().square() * up.relu()) @ ffn.w_down.double().t() + biases.get("b_down", 0)
    assert torch.allclose(twin.dense(wide), expected, rtol=1e-9)


@pytest.mark.parametrize("plain", [False, True])
def test_up_and_down_alone(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, _ = pattern_of(40, 128)
    ffn, x = synthetic_ffn("even", 40, 64, 128, nnz=20, plain=plain)
    gate = packed_pattern(pattern, 128, Layout(), dtype=torch.float32, device="cpu")

    def staged(params: FFNParams, given: Any) -> dict[str, Any]:
        dense = unpack(gate).double()
        hidden = dense if params.w_up is None else dense * (params.x.double() @ params.w_up.double().t())
        y = hidden @ params.w_down.double().t()
        return {"up_down": lambda: y} if given is not None else {"gate": lambda: None, "up_down": lambda: None}

    monkeypatch.setitem(KERNELS, "reference", replace(KERNELS["reference"], stage_runs=staged))
    result = bench_packed(ffn, x, gate, BenchRequest(kernels=("reference", "cpu"), seconds=0.001))
    ours = Operation("up_down", "reference", 8)
    assert set(result.times) == {DENSE, GATE, UP_DOWN, ours, Operation("gate", "reference", 8)}
    assert result.errors[ours][1] < 1e-12 < result.errors[UP_DOWN][1] < 1e-5
    assert result.left_out == {"cpu": "what follows its gate product cannot be run alone"}
    assert result.fired.nnz_mean == pytest.approx(float(pattern.nnz.double().mean()))
    assert result.fired.overflowing[8] == int((pattern.nnz > 31).sum()) and result.fired.union == 128


def test_what_hopper_is_given_in_the_gate_products_place_is_what_it_would_emit() -> None:
    hidden = (0.1 + torch.rand(300, 1000)).bfloat16()
    fired = torch.rand(300, 1000) < torch.linspace(0, 1, 300)[:, None]
    given = pack(hidden, fired, hopper.LAYOUT)
    workspace = hopper.HopperWorkspace(300, 1000, torch.bfloat16, CPU)
    workspace.fill(given)
    again = workspace.packed(1000, torch.ones(300, dtype=torch.bool))
    assert torch.equal(again.words, given.words)
    assert torch.equal(unpack(again), torch.where(fired, hidden, 0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows", [8, 300, 5000])
def test_on_a_gpu_every_kernel_is_right_in_and_out_of_graphs(rows: int) -> None:
    ffn, x = synthetic_ffn("heavy", rows, 256, 1024, nnz=40, dtype=torch.bfloat16, device="cuda")
    result = bench(ffn, x, BenchRequest(compiled=False, probes=True, cold=rows == 8, seconds=0.01))
    assert (DENSE in result.replayed) == (rows <= benches.GRAPH_ROWS)
    dense = result.errors[DENSE]
    for key, (mean, largest) in result.errors.items():
        assert mean < 1.25 * dense[0] and largest < 1.5 * dense[1], key
    plain_ffn(x, ffn.w_gate, ffn.w_down)  # the device still answers
    if any(key.kernel == "hopper" for key in result.times) and hopper.has_plan(rows, 1024):
        pattern, _ = pattern_of(rows, 1024)
        given = packed_pattern(pattern, 1024, Layout(), dtype=torch.bfloat16, device="cuda")
        alone = bench_packed(ffn, x, given, BenchRequest(kernels=("hopper",), seconds=0.01))
        assert alone.errors[Operation("up_down", "hopper", 8)][1] < 1.5 * alone.errors[UP_DOWN][1]
