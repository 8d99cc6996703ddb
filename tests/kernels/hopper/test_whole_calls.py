"""Training calls as whole ops give the bits of those that can be traced, and are checked once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.gpu_checks import poison
from support.gpu_training import NAMES, ON_HOPPER, made, ours
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from twell.kernels import training
from twell.kernels.calls import whole_calls
from twell.kernels.training import Trained, train_gated_ffn

pytestmark = ON_HOPPER
SHAPES = [(1, 256, 512), (131, 136, 1032), (1025, 512, 1024), (4097, 1024, 2816)]


def by(
    monkeypatch: pytest.MonkeyPatch, whole: bool, tensors: list[Tensor], **options: Any
) -> tuple[Trained, list[Tensor]]:
    """Results and gradients one way, of memory that held NaN."""
    monkeypatch.setattr(whole_calls, "ENABLED", whole)
    poison()
    return ours(tensors, **options)


def assert_both_agree(monkeypatch: pytest.MonkeyPatch, tensors: list[Tensor], **options: Any) -> None:
    out, grads = by(monkeypatch, False, tensors, **options)
    for turn in range(2):  # the second call is one that was seen
        again, its = by(monkeypatch, True, tensors, **options)
        for name in ("y", "nnz", "fires", "finite"):
            assert torch.equal(getattr(out, name).nan_to_num(7), getattr(again, name).nan_to_num(7)), (turn, name)
            assert getattr(out, name).dtype == getattr(again, name).dtype, name
        torch.testing.assert_close(again.l1, out.l1, rtol=1e-6, atol=0, equal_nan=True)
        for name, got, want in zip(NAMES, its, grads, strict=True):
            assert got.dtype == want.dtype and got.stride() == want.stride(), (turn, name)
            assert torch.equal(got.nan_to_num(7), want.nan_to_num(7)), (turn, name)


@pytest.mark.parametrize("shift", [-60.0, -2.2, 60.0], ids=["all dead", "sparse", "all alive"])
@pytest.mark.parametrize("capacity", [None, 1, 64])
@pytest.mark.parametrize(("n", "d_model", "d_ff"), SHAPES)
def test_same_bits(
    monkeypatch: pytest.MonkeyPatch, n: int, d_model: int, d_ff: int, capacity: int | None, shift: float
) -> None:
    assert_both_agree(monkeypatch, made(n, d_model, d_ff, shift), capacity=capacity)


@pytest.mark.parametrize("by_neuron", [False, True])
@pytest.mark.parametrize("masters", [torch.bfloat16, torch.float32])
def test_same_bits_of_masters_however_they_lie(
    monkeypatch: pytest.MonkeyPatch, masters: torch.dtype, by_neuron: bool
) -> None:
    tensors = made(300, 264, 520)
    tensors[1:] = [tensor.detach().to(masters).requires_grad_() for tensor in tensors[1:]]
    if by_neuron:
        tensors[3] = tensors[3].detach().t().contiguous().t().requires_grad_()
    rows = (torch.arange(300, device="cuda") % 3 != 0).to(torch.uint8)
    assert_both_agree(monkeypatch, tensors, rows=rows)
    with torch.no_grad():
        tensors[0][7] = torch.inf
    assert_both_agree(monkeypatch, tensors, rows=rows)


def test_tensors_that_lie_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """At addresses that copies of 16 bytes do not take."""
    tensors = [
        torch.cat([tensor.new_zeros(1), tensor.detach().flatten()])[1:].view(tensor.shape).requires_grad_()
        for tensor in made(131, 136, 1032)
    ]
    assert all(tensor.data_ptr() % 16 for tensor in tensors)
    assert_both_agree(monkeypatch, tensors)


def test_rows_may_be_written_to_before_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_calls, "ENABLED", True)
    tensors, rows = made(300, 256, 512), (torch.arange(300, device="cuda") % 3 != 0).to(torch.uint8)
    want = torch.autograd.grad(train_gated_ffn(*tensors, rows=rows).l1, tensors)  # type: ignore[arg-type]
    out = train_gated_ffn(*tensors, rows=rows)  # type: ignore[arg-type]
    rows.zero_()
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(out.l1, tensors), want, strict=True))


def test_one_loss_alone_and_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """y's gradient may be missing, or l1's; x may have more dimensions; y may be written to."""
    tensors = made(300, 256, 512)
    folded = [tensors[0].detach().view(3, 100, 256).requires_grad_(), *tensors[1:]]
    found = []
    for whole in (False, True):
        monkeypatch.setattr(whole_calls, "ENABLED", whole)
        out = train_gated_ffn(*folded)  # type: ignore[arg-type]
        assert out.y.shape == (3, 100, 256) and out.l1.shape == ()
        found.append(
            [*torch.autograd.grad(out.y.sum(), folded), *torch.autograd.grad(train_gated_ffn(*folded).l1, folded)]
        )  # type: ignore[arg-type]
        train_gated_ffn(*folded).y.mul_(2).sum().backward()  # type: ignore[arg-type]
    for one, other in zip(*found, strict=True):
        assert one.shape == other.shape and torch.equal(one, other)


def test_activation_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_calls, "ENABLED", True)
    tensors = made(1025, 512, 1024)

    def loss(*values: Tensor) -> Tensor:
        out = train_gated_ffn(*values)
        return out.y.float().square().sum() + out.l1

    want = torch.autograd.grad(loss(*tensors), tensors)
    got = torch.autograd.grad(checkpoint(loss, *tensors, use_reentrant=False), tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_call_that_was_seen_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_calls, "ENABLED", True)
    tensors = made(264, 256, 512)
    ours(tensors)
    monkeypatch.setattr(training, "_check", lambda *_: pytest.fail("checked again"))
    ours(tensors)
    with pytest.raises(pytest.fail.Exception, match="checked again"):
        ours(made(265, 256, 512))
