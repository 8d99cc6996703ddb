"""Which training calls run as whole ops, and what autograd gets of them; the ops are the reference's passes here."""

from __future__ import annotations

from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.training_calls import COEFFICIENT
from torch import Tensor

from twell.kernels import training
from twell.kernels.backends import hopper_backward, reference_backward
from twell.kernels.backends.hopper_compact import Room
from twell.kernels.backends.reference_backward import Saved, Weights
from twell.kernels.calls import whole_calls

BF16 = torch.bfloat16
N, D_MODEL, D_FF = 40, 16, 24


class Ops:
    """The two ops in torch, and how often each ran."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        for activation in ("relu", "relu2"):
            name = hopper_backward.op_name("call", activation)
            setattr(self, name, SimpleNamespace(default=partial(self.forward, activation)))
            setattr(self, f"{name}_backward", SimpleNamespace(default=partial(self.backward, activation)))

    def forward(
        self, activation: str, x: Tensor, gate: Tensor, up: Tensor | None, down: Tensor, rows: Tensor | None,
        values: int, whole_from: int, offsets: tuple[int, ...], nbytes: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls.append("forward")
        assert gate.dtype == x.dtype and (up is None or up.dtype == x.dtype)
        assert values % 8 == 0 and -1 <= whole_from <= values * D_MODEL / x.numel() and nbytes > offsets[-1]
        flat, weights = x.flatten(0, -2), Weights(gate, up, down.to(x.dtype), None, None, None)
        out = reference_backward.forward(flat, weights, rows, activation)
        saved = out.saved
        y = out.y.reshape(x.shape).clone()
        return y, out.l1, out.nnz, out.fires, saved.finite, saved.gate, saved.up, saved.counted, out.l1.clone()

    def backward(
        self, activation: str, dy: Tensor, d_l1: Tensor | None, x: Tensor, gate: Tensor, up: Tensor | None,
        down: Tensor, finite: Tensor, rows: Tensor | None, kept_gate: Tensor, kept_up: Tensor, counted: Tensor,
        last: Tensor, offsets: tuple[int, ...], repeat: tuple[int, ...], nbytes: int, wide: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        self.calls.append("backward")
        layout = hopper_backward.backward_layout(N, D_MODEL, D_FF, Room(kept_gate.numel()))
        assert dy.is_contiguous() and len(offsets) == len(layout.offsets)
        d_l1 = torch.zeros(()) if d_l1 is None else d_l1
        by_neuron = down.stride(0) == 1
        weights = Weights(gate, up, down.to(x.dtype), None, None, None)
        kept = Saved(kept_gate, kept_up, counted, finite)
        grads = reference_backward.backward(
            x.flatten(0, -2), weights, kept, activation, dy.flatten(0, -2), d_l1, torch.float32 if wide else x.dtype
        )
        assert grads.x is not None and grads.down is not None
        d_up = gate.new_full(gate.shape, torch.nan) if grads.up is None else grads.up
        return grads.x.view(x.shape), grads.gate, d_up, grads.down.t().contiguous() if by_neuron else grads.down


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Ops:
    """On, and taken by hopper whatever the device."""
    made = Ops()
    monkeypatch.setattr(torch.ops, "twell", made)
    monkeypatch.setattr(hopper_backward, "refuses", lambda *_: None)
    monkeypatch.setattr(whole_calls, "ENABLED", True)
    monkeypatch.setattr(whole_calls, "_remembered", {})
    return made


def made(masters: torch.dtype = BF16, by_neuron: bool = False, seed: int = 0, n: int = N) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    shapes = (n, D_MODEL), (D_FF, D_MODEL), (D_FF, D_MODEL), (D_MODEL, D_FF)
    x, gate, up, down = (torch.randn(shape, generator=source) for shape in shapes)
    down = down.t().contiguous().t() if by_neuron else down
    weights = [tensor.to(masters) for tensor in (gate, up, down)]
    return [tensor.requires_grad_() for tensor in (x.to(BF16), *weights)]


def gradients(tensors: list[Tensor], **options: Any) -> list[Tensor]:
    out = training.train_gated_ffn(*tensors, **options)  # type: ignore[arg-type]
    loss = (out.y.float() * torch.linspace(-1, 1, D_MODEL)).sum() + COEFFICIENT * out.l1
    return list(torch.autograd.grad(loss, tensors))


@pytest.mark.parametrize("by_neuron", [False, True])
@pytest.mark.parametrize("masters", [BF16, torch.float32])
def test_gradients_are_the_traced_ops(ops: Ops, masters: torch.dtype, by_neuron: bool) -> None:
    tensors, rows = made(masters, by_neuron), (torch.arange(N) % 3 > 0).byte()
    for options in ({}, {"rows": rows}):
        want = gradients(tensors, kernel="reference", **options)
        assert not ops.calls
        got = gradients(tensors, **options)
        assert ops.calls == ["forward", "backward"]
        ops.calls.clear()
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)
        assert got[3].stride() == tensors[3].stride()


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
def test_activations_and_plain_ffns(ops: Ops, gated: bool, activation: str) -> None:
    tensors = made()
    chosen = tensors if gated else [*tensors[:2], tensors[3]]
    train = training.train_gated_ffn if gated else training.train_plain_ffn
    found = []
    for kernel in ("reference", "auto"):
        out = train(*chosen, activation=activation, kernel=kernel)  # type: ignore[arg-type]
        found.append(torch.autograd.grad(out.y.sum() + out.l1, chosen))
    assert ops.calls == ["forward", "backward"]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_hopper_takes_every_ffn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_backward, "_cannot_run", lambda *_: None)
    for gated, activation in product((True, False), ("relu", "relu2")):
        choice = training.choose("cuda", BF16, 64, 128, 300, gated=gated, activation=activation)
        assert choice.kernel == "hopper", (gated, activation, choice)


def test_a_like_call_is_checked_once(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients(made())
    monkeypatch.setattr(training, "_check", lambda *_: pytest.fail("checked"))
    gradients(made(seed=1))
    assert ops.calls == ["forward", "backward"] * 2
    unlike: list[tuple[list[Tensor], dict[str, Any]]] = [
        (made(n=N + 8), {}), (made(torch.float32), {}), (made(by_neuron=True), {}), (made(), {"capacity": 16}),
        (made(), {"kernel": "hopper"}), (made(), {"rows": torch.ones(N, dtype=torch.uint8)}),
        ([*made()[:3], made()[3].detach()], {}),
    ]  # fmt: skip
    for tensors, options in unlike:
        with pytest.raises(pytest.fail.Exception, match="checked"):
            training.train_gated_ffn(*tensors, **options)  # type: ignore[arg-type]


def test_frozen_weights_and_data_take_the_same_ops(ops: Ops) -> None:
    tensors = made()
    want = gradients(tensors)
    for frozen in ({0}, {0}, {1, 2, 3}):  # the second time as a call whose like was checked
        given = [tensor.detach().requires_grad_(at not in frozen) for at, tensor in enumerate(tensors)]
        out = training.train_gated_ffn(*given)  # type: ignore[arg-type]
        loss = (out.y.float() * torch.linspace(-1, 1, D_MODEL)).sum() + COEFFICIENT * out.l1
        needing = [at for at in range(len(given)) if at not in frozen]
        got = torch.autograd.grad(loss, [given[at] for at in needing])
        assert all(torch.equal(one, want[at]) for one, at in zip(got, needing, strict=True))
    assert ops.calls == ["forward", "backward"] * 4


def test_bad_calls_are_refused_after_good_ones(ops: Ops) -> None:
    gradients(made())
    tensors = made()
    with pytest.raises(TypeError, match="w_up: expected a tensor, got list"):
        training.train_gated_ffn(*tensors[:2], [], tensors[3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contiguous"):
        training.train_gated_ffn(tensors[0].detach().t().contiguous().t().requires_grad_(), *tensors[1:])  # type: ignore[arg-type]


def test_others_take_the_traced_ops(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under no_grad, compiled, of a subclass, when turned off, and what hopper refuses."""

    class Like(Tensor):
        pass

    tensors = made()
    monkeypatch.setattr(training, "ffn_forward", lambda *_: pytest.fail("traced"))
    calls = [(tensors, False), ([tensors[0].as_subclass(Like), *tensors[1:]], True)]  # type: ignore[arg-type]
    for arguments, grad in calls:
        with torch.set_grad_enabled(grad), pytest.raises(pytest.fail.Exception, match="traced"):
            training.train_gated_ffn(*arguments)  # type: ignore[arg-type]
    for name, value in (("is_compiling", lambda: True), ("is_compiling", lambda: False)):
        monkeypatch.setattr(torch.compiler, name, value)
        if value():
            with pytest.raises(pytest.fail.Exception, match="traced"):
                gradients(tensors)
    gradients(tensors)
    with torch.no_grad(), pytest.raises(pytest.fail.Exception, match="traced"):
        training.train_gated_ffn(*tensors)  # type: ignore[arg-type]
    monkeypatch.setattr(whole_calls, "ENABLED", False)
    with pytest.raises(pytest.fail.Exception, match="traced"):
        gradients(tensors)
    assert ops.calls == ["forward", "backward"]


def test_no_second_backward_pass(ops: Ops) -> None:
    tensors = made()
    out = training.train_gated_ffn(*tensors)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="create_graph"):
        torch.autograd.grad(out.y.sum(), tensors, create_graph=True)


def test_a_missing_gradient_is_zero_and_y_may_be_written_to(ops: Ops) -> None:
    tensors = made()
    folded = [tensors[0].detach().view(4, 10, D_MODEL).requires_grad_(), *tensors[1:]]
    out = training.train_gated_ffn(*folded)  # type: ignore[arg-type]
    assert out.y.shape == (4, 10, D_MODEL) and out.l1.shape == ()
    l1_alone = torch.autograd.grad(out.l1, folded)
    assert not l1_alone[3].any() and l1_alone[1].any()
    out = training.train_gated_ffn(*folded)  # type: ignore[arg-type]
    twice = torch.autograd.grad(out.y.mul_(2).sum(), folded)
    once = torch.autograd.grad(training.train_gated_ffn(*folded).y.sum(), folded)  # type: ignore[arg-type]
    assert all(torch.equal(2 * one, other) for one, other in zip(once, twice, strict=True))


def test_what_is_remembered_stays_bounded(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_calls, "MOST_REMEMBERED", 3)
    for n in range(8, 80, 8):
        training.train_gated_ffn(*made(n=n))  # type: ignore[arg-type]
        assert len(whole_calls._remembered) <= 3
