"""The op's backward pass by the reference: against finite differences, against autograd, compiled, checkpointed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.training_calls import (
    COEFFICIENT,
    Tensors,
    assert_close,
    expected,
    gradients,
    random_ffn,
    train_ffn,
    weights_of,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from twell.kernels import training
from twell.kernels.backends.reference_backward import dense_loss_reference

SAVE = 11  # the place of `save` among the arguments of the op


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_gradcheck(gated: bool, biased: bool, activation: str) -> None:
    tensors = random_ffn(5, 8, 16, gated=gated, biased=biased)
    names = list(tensors)

    def both(*values: Tensor) -> tuple[Tensor, Tensor]:
        out = train_ffn(dict(zip(names, values, strict=True)), activation=activation)
        return out.y, out.l1

    assert torch.autograd.gradcheck(both, tuple(tensors.values()))


@pytest.mark.parametrize("shift", [-100.0, 0.0, 100.0], ids=["all dead", "some", "all alive"])
@pytest.mark.parametrize(("n", "d_model", "d_ff"), [(1, 8, 8), (7, 24, 40), (131, 136, 264), (257, 40, 88)])
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_are_autograds(gated: bool, n: int, d_model: int, d_ff: int, shift: float) -> None:
    tensors = random_ffn(n, d_model, d_ff, gated=gated, shift=shift)
    out = train_ffn(tensors)
    assert_close(gradients(tensors, out.y, out.l1), expected(tensors), 1e-12)
    assert int(out.nnz.sum()) == int(out.fires.sum())
    if shift:
        assert int(out.nnz.sum()) == (n * d_ff if shift > 0 else 0)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_many_rows_are_added_in_parts(monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    monkeypatch.setattr("twell.kernels.backends.reference_backward.ROWS", 16)
    tensors = random_ffn(67, 24, 40)
    out = train_ffn(tensors, activation=activation)
    assert_close(gradients(tensors, out.y, out.l1), expected(tensors, activation), 1e-12)


@pytest.mark.parametrize("masters", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes(dtype: torch.dtype, masters: torch.dtype | None) -> None:
    if masters is not None and dtype == torch.float32:
        pytest.skip("float32 weights are what that is")
    tensors = random_ffn(64, 64, 128, biased=False, dtype=dtype, masters=masters)
    out = train_ffn(tensors)
    got = gradients(tensors, out.y, out.l1)
    rounded = {n: t.detach().to(dtype).requires_grad_() for n, t in tensors.items()}
    assert_close(got, expected(rounded), {torch.bfloat16: 0.02, torch.float16: 0.003, torch.float32: 1e-5}[dtype])
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
    assert out.l1.dtype == torch.float32


def test_rows_that_do_not_count() -> None:
    tensors = random_ffn(10, 16, 24)
    rows = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 0, 1], dtype=torch.uint8)
    out = train_ffn(tensors, rows=rows)
    y, _ = dense_loss_reference(tensors["x"], weights_of(tensors), "relu")
    counted = {**tensors, "x": tensors["x"].detach()[rows.bool()]}
    _, l1 = dense_loss_reference(counted["x"], weights_of(tensors), "relu")
    torch.testing.assert_close(out.y, y)
    torch.testing.assert_close(out.l1, l1)
    with torch.no_grad():
        assert torch.equal(out.fires, train_ffn(counted).fires)
    (grad,) = torch.autograd.grad(out.l1, tensors["x"])
    assert (grad[rows == 0] == 0).all() and (grad[rows == 1] != 0).any()


def test_no_row_counts() -> None:
    tensors = random_ffn(3, 8, 16)
    out = train_ffn(tensors, rows=torch.zeros(3, dtype=torch.uint8))
    assert out.l1.item() == 0 and int(out.fires.sum()) == 0
    assert all(not grad.any() for grad in torch.autograd.grad(out.l1, list(tensors.values()), allow_unused=True))


def test_no_rows_at_all() -> None:
    tensors = random_ffn(0, 8, 16)
    out = train_ffn(tensors)
    (out.y.sum() + out.l1).backward()
    assert out.y.shape == (0, 8) and not tensors["w_gate"].grad.any()  # type: ignore[union-attr]


def test_a_broken_row_stays_alone() -> None:
    tensors = random_ffn(6, 8, 16)
    with torch.no_grad():
        tensors["x"][2] = torch.inf
    out = train_ffn(tensors)
    assert out.finite.tolist() == [True, True, False, True, True, True]
    got = gradients(tensors, torch.where(out.finite[:, None], out.y, 0), out.l1)
    others = {**tensors, "x": tensors["x"].detach()[out.finite].clone().requires_grad_()}
    alone = train_ffn(others)
    direction = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)[out.finite]
    want = torch.autograd.grad((alone.y * direction).sum() + COEFFICIENT * alone.l1, list(others.values()))
    for (name, grad), right in zip(got.items(), want, strict=True):
        torch.testing.assert_close(grad[out.finite] if name == "x" else grad, right)
    assert got["x"][2].isnan().all()


def test_same_call_same_bits() -> None:
    tensors = random_ffn(50, 40, 88, dtype=torch.float32)
    first, second = (gradients(tensors, out.y, out.l1) for out in (train_ffn(tensors), train_ffn(tensors)))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_leading_dimensions() -> None:
    tensors = random_ffn(12, 16, 24)
    flat = train_ffn(tensors)
    out = train_ffn({**tensors, "x": tensors["x"].view(3, 4, 16)})
    assert out.y.shape == (3, 4, 16) and torch.equal(out.y.view(12, 16), flat.y) and torch.equal(out.nnz, flat.nnz)


def test_w_down_by_neuron() -> None:
    tensors = random_ffn(9, 16, 24)
    turned = {**tensors, "w_down": tensors["w_down"].detach().t().contiguous().t().requires_grad_()}
    out = train_ffn(turned)
    assert_close(gradients(turned, out.y, out.l1), expected(tensors), 1e-12)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("needing", [("w_gate", "w_up", "w_down"), ("x",), ("x", "b_up")])
def test_parts_that_need_no_gradient(needing: tuple[str, ...], compiled: bool) -> None:
    tensors = random_ffn(4, 8, 16)
    out = train_ffn(tensors)
    want = gradients(tensors, out.y, out.l1)
    given = {name: tensor.detach().requires_grad_(name in needing) for name, tensor in tensors.items()}
    train = torch.compile(train_ffn, backend="aot_eager", fullgraph=True) if compiled else train_ffn
    out = train(given)
    got = gradients({name: given[name] for name in needing}, out.y, out.l1)
    assert all(torch.equal(got[name], want[name]) for name in needing)


def test_gradients_accumulate() -> None:
    tensors = random_ffn(9, 16, 24)
    for _ in range(2):
        out = train_ffn(tensors)
        (out.y.sum() + out.l1).backward()
    once = random_ffn(9, 16, 24)
    out = train_ffn(once)
    (out.y.sum() + out.l1).backward()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor.grad, 2 * once[name].grad)  # type: ignore[operator]


@pytest.mark.parametrize("gated", [True, False])
def test_one_graph_when_compiled(gated: bool) -> None:
    tensors = random_ffn(20, 16, 24, gated=gated, dtype=torch.float32)

    def loss(values: Tensors) -> Tensor:
        out = train_ffn(values)
        return out.y.square().sum() + COEFFICIENT * out.l1

    want = torch.autograd.grad(loss(tensors), list(tensors.values()))
    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(tensors), list(tensors.values()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_the_ops_follow_torchs_rules() -> None:
    tensors = random_ffn(6, 8, 16, dtype=torch.float32)
    arguments = (tensors["x"], *weights_of(tensors), None, "relu", "reference", 16, True)
    torch.library.opcheck(torch.ops.twell.ffn_forward.default, arguments)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool) -> None:
    tensors = random_ffn(11, 16, 24)
    names = list(tensors)

    def both(*values: Tensor) -> tuple[Tensor, Tensor]:
        out = train_ffn(dict(zip(names, values, strict=True)))
        return out.y, out.l1

    y, l1 = checkpoint(both, *tensors.values(), use_reentrant=reentrant)
    if reentrant:  # it follows no torch.autograd.grad
        direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        ((y * direction).sum() + COEFFICIENT * l1).backward()
        got = {name: tensor.grad for name, tensor in tensors.items()}
    else:
        got = gradients(tensors, y, l1)
    assert_close(got, expected(tensors), 1e-12)  # type: ignore[arg-type]


def test_autocast_casts_x_and_keeps_masters() -> None:
    tensors = random_ffn(16, 32, 64, dtype=torch.float32, biased=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = train_ffn(tensors)
    assert out.y.dtype == torch.bfloat16
    got = gradients(tensors, out.y, out.l1)
    assert all(grad.dtype == torch.float32 for grad in got.values())


@pytest.mark.parametrize("way", ["no_grad", "inference_mode", "no tensor needs one"])
def test_nothing_is_kept_without_gradients(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    asked: list[bool] = []
    whole = training.ffn_forward

    def watched(*arguments: Any) -> Any:
        asked.append(arguments[SAVE])
        results = whole(*arguments)
        assert sum(tensor.numel() for tensor in results[5:]) == 0
        return results

    monkeypatch.setattr(training, "ffn_forward", watched)
    tensors = random_ffn(4, 8, 16)
    if way == "no tensor needs one":
        out = train_ffn({name: tensor.detach() for name, tensor in tensors.items()})
    else:
        with getattr(torch, way)():
            out = train_ffn(tensors)
    assert asked == [False] and not out.y.requires_grad
