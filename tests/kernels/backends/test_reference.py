"""Outputs and counts against numpy float64, on inputs whose sums are exact: of the reference, and of the CPU kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from twell.kernels.backends import reference
from twell.kernels.layout import Layout, unpack
from twell.kernels.ops import gated_ffn, plain_ffn

pytestmark = pytest.mark.usefixtures("kernel")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
D_MODEL = 40


def run(tensors: dict[str, Any], dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any):
    op = gated_ffn if "w_up" in tensors else plain_ffn
    return op(**{name: tensor.to(device, dtype) for name, tensor in tensors.items()}, **options)


def assert_output(y: torch.Tensor, expected: Any, dtype: torch.dtype) -> None:
    """Exact in float32 and float64; else within two roundings of the sum's terms."""
    error = np.abs(y.double().cpu().numpy() - expected.y)
    allowed = 0 if dtype.itemsize > 2 else 2 * torch.finfo(dtype).eps * expected.scale
    worst = np.unravel_index(np.argmax(error - allowed), error.shape) if error.size else ()
    assert np.all(error <= allowed), f"first at {worst}: off by {error[worst]}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("bias", [None, 0, -6])
def test_counts_and_outputs_are_exact(dtype, gated, bias, device, make_ffn, oracle) -> None:
    for n, d_ff in ((0, 8), (1, 8), (2, 264), (127, 256), (129, 120), (257, 1032)):
        tensors = make_ffn(n, D_MODEL, d_ff, gated=gated, bias=bias, seed=n)
        expected = oracle(tensors)
        y, stats = run(tensors, dtype, device, layout=Layout(), want_packed=True)
        assert y.dtype == dtype
        assert stats.nnz.dtype == torch.int32
        assert stats.nnz.tolist() == expected.nnz.tolist()
        assert stats.finite.tolist() == [True] * n
        assert_output(y, expected, dtype)
        assert np.array_equal(unpack(stats.packed).double().cpu().numpy(), expected.value)


def test_autocast_changes_nothing(device, make_ffn) -> None:
    tensors = {name: tensor * 1.001 for name, tensor in make_ffn(9, D_MODEL, 264, bias=0).items()}  # no bfloat16 has it
    expected, counted = run(tensors, torch.float32, device)
    with torch.autocast(device, torch.bfloat16):
        y, stats = run(tensors, torch.float32, device)
    assert torch.equal(y, expected)
    assert torch.equal(stats.nnz, counted.nnz)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_do_not_show(dtype, make_ffn, oracle, monkeypatch) -> None:
    monkeypatch.setattr(reference, "MIN_ROWS", 1)
    monkeypatch.setattr(reference, "CPU_CHUNK", 7 * 64)  # seven rows at a time
    for n in (6, 7, 8, 29):
        tensors = make_ffn(n, D_MODEL, 64, bias=-2, seed=n)
        numbers = torch.arange(n, dtype=torch.int32)
        info = {"tokens": numbers % 5, "sequences": numbers // 3, "probes": "neurons", "layout": Layout(32, 8)}
        y, stats = run(tensors, dtype, want_packed=True, up_relu=True, **info)
        expected = oracle(tensors, up_relu=True)
        assert_output(y, expected, dtype)
        assert stats.nnz.tolist() == expected.nnz.tolist()
        assert stats.nnz_used.tolist() == expected.used.tolist()
        assert stats.neurons.fires.tolist() == expected.fired.sum(0).tolist()
        assert int(stats.tiles.rows.sum()) == n
        assert len(stats.packed.spill) > 0
        assert np.array_equal(unpack(stats.packed).double().numpy(), expected.value)


def test_float32_is_the_dense_computation() -> None:
    torch.manual_seed(0)
    x, gate, up, down = torch.randn(200, 64), torch.randn(176, 64), torch.randn(176, 64), torch.randn(64, 176)
    dense = functional.linear(functional.linear(x, gate).relu() * functional.linear(x, up), down)
    y, stats = gated_ffn(x, gate, up, down, kernel="reference")
    assert torch.equal(y, dense)
    assert torch.equal(stats.nnz, (functional.linear(x, gate) > 0).sum(1).int())


def test_leading_dimensions_come_back(make_ffn) -> None:
    tensors = make_ffn(6, D_MODEL, 24)
    y, stats = run(tensors)
    for shape in ((6,), (2, 3), (3, 1, 2)):
        folded, same = run({**tensors, "x": tensors["x"].view(*shape, D_MODEL)})
        assert folded.shape == (*shape, D_MODEL)
        assert torch.equal(folded.view(6, -1), y)
        assert torch.equal(same.nnz, stats.nnz)
    single, stats = run({**tensors, "x": tensors["x"][0].clone()})
    assert torch.equal(single, y[0])
    assert stats.nnz.shape == (1,)
    empty, stats = run({**tensors, "x": torch.zeros(2, 0, D_MODEL)}, layout=Layout(), want_packed=True)
    assert empty.shape == (2, 0, D_MODEL)
    assert stats.nnz.shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_relu_squared_and_a_relu_on_the_up_branch(dtype, make_ffn, oracle) -> None:
    tensors = make_ffn(33, 16, 72, bias=-1)  # squares of at most 18 are exact in every dtype
    expected = oracle(tensors, activation="relu2", up_relu=True)
    y, stats = run(tensors, dtype, activation="relu2", up_relu=True, want_packed=True)
    assert_output(y, expected, dtype)
    assert stats.nnz.tolist() == expected.nnz.tolist()
    assert stats.nnz_used.tolist() == expected.used.tolist()
    assert (expected.used < expected.nnz).any()
    if dtype.itemsize > 2:
        assert np.array_equal(unpack(stats.packed).double().numpy(), expected.value)
    assert run(tensors, dtype)[1].nnz_used is None


@pytest.mark.parametrize("activation", ["relu", "relu2", "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("gated", [True, False])
def test_a_threshold_counts_large_hidden_values(activation, gated, make_ffn, oracle) -> None:
    tensors = make_ffn(50, D_MODEL, 64, gated=gated, bias=-1)
    expected = oracle(tensors, activation=activation, threshold=2.5)
    nearest = np.abs(np.abs(expected.hidden) - 2.5).min()
    assert nearest > 1e-5, "no value may lie within rounding of the threshold"
    y, stats = run(tensors, activation=activation, threshold=2.5, want_packed=True)
    assert 0 < stats.nnz.sum() < 50 * 64
    assert stats.nnz.tolist() == expected.nnz.tolist()
    np.testing.assert_allclose(y.numpy(), expected.y, rtol=0, atol=1e-5 * expected.scale.max())
    kept = np.where(expected.fired, expected.value, 0)
    np.testing.assert_allclose(unpack(stats.packed).numpy(), kept, rtol=1e-4, atol=0)


def test_a_threshold_is_strict(make_ffn) -> None:
    tensors = make_ffn(50, D_MODEL, 64, gated=False)
    above, at = (run(tensors, threshold=tau)[1].nnz for tau in (2.999, 3.0))
    value = functional.linear(tensors["x"], tensors["w_in"]).relu()
    assert torch.equal(above, (value >= 3).sum(1).int())
    assert torch.equal(at, (value > 3).sum(1).int())


def test_firing_is_decided_before_rounding(device) -> None:
    x, down = torch.zeros(1, 8), torch.ones(8, 8)
    x[0, 0] = 2.0**-14
    gate = torch.zeros(8, 8)
    gate[3, 0] = 2.0**-12  # the pre-activation 2^-26 is 0 in float16
    y, stats = run({"x": x, "w_gate": gate, "w_up": gate, "w_down": down}, torch.float16, device, want_packed=True)
    assert stats.nnz.tolist() == [1]
    assert stats.packed.words[0, 0, :2].tolist() == [1, 3]
    assert not y.any()


def test_what_did_not_fire_is_never_multiplied() -> None:
    x, gate, up, down = torch.ones(2, 8), -torch.ones(8, 8), torch.ones(8, 8), torch.ones(8, 8)
    gate[5] = 1.0
    gate[:, 0], up[:, 0] = 0.0, 0.0
    x[0, 0], up[2, 0] = 3e38, 2.0  # neuron 2 does not fire, and its up pre-activation is infinite
    y, stats = gated_ffn(x, gate, up, down)
    assert functional.linear(x, up)[0, 2].isinf()
    assert stats.finite.tolist() == [True, True]
    assert stats.nnz.tolist() == [1, 1]
    assert torch.equal(y, torch.full((2, 8), 49.0))
    up[5, 0] = 2.0  # now that of the fired neuron is
    y, stats = gated_ffn(x, gate, up, down)
    assert stats.finite.tolist() == [False, True]
    assert stats.nnz.tolist() == [0, 1]
    assert y[0].isnan().all()
    assert torch.equal(y[1], torch.full((8,), 49.0 + 14.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("gated", [True, False])
def test_a_row_that_is_not_finite_stays_alone(dtype, poison, gated, device, make_ffn) -> None:
    n = 23
    tensors = make_ffn(n, D_MODEL, 72, gated=gated, bias=-1)
    numbers = torch.arange(n, dtype=torch.int32, device=device)
    bad = (numbers == 4) | (numbers == 22)
    options: dict[str, Any] = {"probes": "neurons", "layout": Layout(64, 4), "tokens": numbers, "sequences": numbers}
    clean_y, clean = run(tensors, dtype, device, rows=(~bad).byte(), **options)
    poisoned = tensors["x"].clone()
    poisoned[4, 0] = poison
    poisoned[22] = poison
    y, stats = run({**tensors, "x": poisoned}, dtype, device, want_packed=True, **options)
    assert y[bad].isnan().all()
    assert torch.equal(y[~bad], clean_y[~bad])
    assert torch.equal(stats.finite, ~bad)
    assert not stats.nnz[bad].any()
    assert torch.equal(stats.nnz[~bad], clean.nnz[~bad])
    assert torch.equal(stats.packed.counts.sum(1), stats.nnz)
    for name, total in vars(stats.neurons).items():
        assert torch.equal(total, getattr(clean.neurons, name)), name
    assert torch.equal(stats.tiles.pairs, clean.tiles.pairs)
    assert torch.equal(stats.tiles.rows, clean.tiles.rows)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_past_float32_flags_its_row(sign) -> None:
    """Also where it is -inf, in a neuron that does not fire."""
    x, gate, ones = torch.ones(2, 8), torch.ones(8, 8), torch.ones(8, 8)
    x[0] = 0
    x[0, 0], gate[:, 0] = 3e38, 0.0
    gate[6, 0] = sign * 2.0
    y, stats = gated_ffn(x, gate, ones * 1e-38, ones)
    assert stats.finite.tolist() == [False, True]
    assert stats.nnz[0] == 0
    assert y[0].isnan().all()
    assert y[1].isfinite().all()


def test_a_hidden_value_past_float16_flags_its_row() -> None:
    eye = torch.eye(8, dtype=torch.float16)
    x = torch.zeros(2, 8, dtype=torch.float16)
    x[0, 0], x[1, 0] = 200.0, 300.0  # squares: 40 000, and 90 000 > 65 504
    y, stats = plain_ffn(x, eye, eye, activation="relu2")
    assert stats.finite.tolist() == [True, False]
    assert y[0, 0] == 40_000
    assert y[1].isnan().all()


@pytest.mark.parametrize("probes", ["none", "counts"])
def test_probes_change_no_output(probes, make_ffn) -> None:
    tensors = make_ffn(31, D_MODEL, 64)
    numbers = torch.arange(31, dtype=torch.int32)
    full, _ = run(tensors, probes="neurons", tokens=numbers, sequences=numbers, layout=Layout(), want_packed=True)
    y, stats = run(tensors, probes=probes)
    assert torch.equal(y, full)
    assert stats.nnz.shape == ((0,) if probes == "none" else (31,))
    assert (stats.tiles, stats.neurons, stats.packed) == (None, None, None)
