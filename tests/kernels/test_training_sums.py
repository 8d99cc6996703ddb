"""Gradients of weights that are added into given tensors, by the reference: values, dtypes, refusals, compiled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.training_calls import COEFFICIENT, Tensors, assert_close, expected, random_ffn, train_ffn, weights_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from twell.kernels import training

WEIGHTS = ("w_gate", "w_up", "w_down", "w_in", "w_out")


def names_of(tensors: Tensors) -> list[str]:
    return [name for name in tensors if name in WEIGHTS]


def zeros_like(tensors: Tensors, dtype: torch.dtype | None = None, value: float = 0.0) -> list[Tensor]:
    return [torch.full_like(tensors[name].detach(), value, dtype=dtype) for name in names_of(tensors)]


def step(tensors: Tensors, **options: Any) -> None:
    out = train_ffn(tensors, **options)
    direction = torch.randn(out.y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ((out.y * direction.to(out.y.dtype)).sum() + COEFFICIENT * out.l1).backward()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_are_added_and_autograd_gets_none(gated: bool, biased: bool) -> None:
    tensors = random_ffn(37, 24, 40, gated=gated, biased=biased)
    sums = zeros_like(tensors, value=3.0)
    for _ in range(2):
        step(tensors, sums=sums)
    want = expected(tensors)
    got = {name: total - 3 for name, total in zip(names_of(tensors), sums, strict=True)}
    assert_close(got, {name: 2 * want[name] for name in got}, 1e-12)
    assert all(tensors[name].grad is None for name in got)
    others = {name: tensor.grad for name, tensor in tensors.items() if name not in got}
    assert_close(others, {name: 2 * want[name] for name in others}, 1e-12)  # type: ignore[arg-type]


def test_many_rows_are_added_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twell.kernels.backends.reference_backward.ROWS", 16)
    tensors = random_ffn(67, 24, 40)
    sums = zeros_like(tensors)
    step(tensors, sums=sums)
    got = dict(zip(names_of(tensors), sums, strict=True))
    assert_close(got, {name: expected(tensors)[name] for name in got}, 1e-12)


def test_float32_sums_of_16_bit_weights_are_not_rounded() -> None:
    """Four steps, each of which adds less than a sum of 16 bits can hold."""
    tensors = random_ffn(64, 64, 128, biased=False, dtype=torch.bfloat16)
    wide, narrow = (zeros_like(tensors, dtype, 1024.0) for dtype in (torch.float32, torch.bfloat16))
    for _ in range(4):
        step(tensors, sums=wide)
        step(tensors, sums=narrow)
    want = expected(tensors)
    errors = []
    for sums in (wide, narrow):
        off = [(total.double() - 1024) / 4 - want[name] for name, total in zip(names_of(tensors), sums, strict=True)]
        errors.append(max(float(e.norm() / want[n].norm()) for n, e in zip(names_of(tensors), off, strict=True)))
    assert errors[0] < 0.01 < 0.05 < errors[1]
    masters = {name: tensor.detach().float().requires_grad_() for name, tensor in tensors.items()}
    masters["x"] = tensors["x"]
    exactly = zeros_like(masters)
    step(masters, sums=exactly)
    wide = zeros_like(tensors, torch.float32)
    step(tensors, sums=wide)
    assert all(torch.equal(one, other) for one, other in zip(wide, exactly, strict=True))
    assert any((total != total.bfloat16()).any() for total in wide)


def test_the_op_says_what_it_writes_to() -> None:
    tensors = random_ffn(6, 8, 16, dtype=torch.float32)
    x, *weights = tensors["x"], *weights_of(tensors)
    kept = list(torch.ops.twell.ffn_forward(x, *weights, None, "relu", "reference", 16, True)[4:])
    detached = [None if tensor is None else tensor.detach() for tensor in (x, *weights)]
    arguments = (
        zeros_like(tensors),
        torch.ones(6, 8),
        torch.ones(()),
        *detached,
        kept[0],
        kept[1:],
        "relu",
        "reference",
    )
    torch.library.opcheck(torch.ops.twell.ffn_backward_into.default, arguments)


def test_masters_and_down_weights_by_neuron() -> None:
    tensors = random_ffn(32, 24, 40, biased=False, dtype=torch.bfloat16, masters=torch.float32)
    turned = {**tensors, "w_down": tensors["w_down"].detach().t().contiguous().t().requires_grad_()}
    plain, sums = zeros_like(tensors), zeros_like(turned)
    assert sums[2].stride() == turned["w_down"].stride() != plain[2].stride()
    step(tensors, sums=plain)
    step(turned, sums=sums)
    step(tensors)
    for name, one, other in zip(names_of(tensors), plain, sums, strict=True):
        assert torch.equal(one, other) and torch.equal(one, tensors[name].grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_one_graph_when_compiled(backend: str, gated: bool) -> None:
    tensors = random_ffn(20, 16, 24, gated=gated, dtype=torch.float32)
    sums, want = zeros_like(tensors), zeros_like(tensors)

    def loss(values: Tensors, into: list[Tensor]) -> Tensor:
        out = train_ffn(values, sums=into)
        return out.y.square().sum() + COEFFICIENT * out.l1

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for _ in range(2):
        compiled(tensors, sums).backward()
        loss(tensors, want).backward()
    for one, other in zip(sums, want, strict=True):
        assert one.any()
        torch.testing.assert_close(one, other)


def test_activation_checkpointing_and_micro_batches() -> None:
    """Two forward passes before their backward passes, each run twice: every gradient is added once."""
    tensors = random_ffn(11, 16, 24)
    sums = zeros_like(tensors)
    names = list(tensors)

    def loss(*values: Tensor) -> Tensor:
        out = train_ffn(dict(zip(names, values, strict=True)), sums=sums)
        return out.y.square().sum() + out.l1

    first, second = (checkpoint(loss, *tensors.values(), use_reentrant=False) for _ in range(2))
    (first + second).backward()  # type: ignore[operator]
    plain = train_ffn(tensors)
    once = torch.autograd.grad(plain.y.square().sum() + plain.l1, [tensors[name] for name in names_of(tensors)])
    for total, want in zip(sums, once, strict=True):
        torch.testing.assert_close(total, 2 * want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sums: sums[:2], "sums: expected a tensor for each of the 3 weight matrices, got 2"),
        (lambda sums: sums[0], "sums: expected a tensor for each of the 3 weight matrices, got Tensor"),
        (lambda sums: [*sums[:2], None], r"sums\[2\]: expected a tensor, got NoneType"),
        (lambda sums: [sums[0].half(), *sums[1:]], r"sums\[0\]: expected torch.float64 or torch.float32, got torch.fl"),
        (lambda sums: [sums[0][:8], *sums[1:]], r"sums\[0\]: expected shape \[16, 8\], got \[8, 8\]"),
        (lambda sums: [sums[0], sums[1].t().contiguous().t(), sums[2]], r"sums\[1\]: expected a contiguous tensor"),
        (lambda sums: [sums[0].requires_grad_(), *sums[1:]], r"sums\[0\]: expected requires_grad=False"),
    ],
)
def test_bad_sums_are_refused_in_one_sentence(change: Any, message: str) -> None:
    tensors = random_ffn(4, 8, 16)
    with pytest.raises((TypeError, ValueError), match=message) as error:
        train_ffn(tensors, sums=change(zeros_like(tensors)))
    assert "\n" not in str(error.value)


def test_sums_are_untouched_without_gradients() -> None:
    tensors = random_ffn(4, 8, 16)
    sums = zeros_like(tensors)
    with torch.no_grad():
        training.train_gated_ffn(**tensors, sums=sums)
    assert not any(total.any() for total in sums)
