"""Training calls of which much fires keep all of g and h, and make nothing again: which ones, and their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.gpu_checks import poison
from support.gpu_training import (
    COEFFICIENT,
    ON_HOPPER,
    SHAPES,
    assert_errors_are_denses,
    assert_l1_of_rows_that_count,
    assert_one_graph,
    direction,
    errors,
    exact,
    firing,
    made,
    ours,
    what_fits,
)
from torch import Tensor

from twell.kernels.backends import hopper_compact
from twell.kernels.backends.hopper_compact import Room
from twell.kernels.calls import whole_calls
from twell.kernels.training import Trained, train_gated_ffn, train_plain_ffn

pytestmark = ON_HOPPER
KINDS = [(True, "relu"), (False, "relu"), (True, "relu2"), (False, "relu2")]
SPARSE, FROM_KEPT, AT_ONCE, PASSES = 1, -2, -1, 0  # as `what_fits` has it


@pytest.fixture(autouse=True)
def _on(both_ways: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several launches of rows forward, in memory of NaN."""
    monkeypatch.setattr(whole_calls, "_remembered", {})
    monkeypatch.setattr(hopper_compact, "ENABLED", True)
    monkeypatch.setattr(hopper_compact, "AT_ONCE", True)
    monkeypatch.setattr(hopper_compact, "FORWARD_ROWS", 1024)
    poison()
    yield
    whole_calls._remembered.clear()


def way_of(tensors: list[Tensor], **options: Any) -> int:
    """Return how the backward pass of a call by the traced ops went."""
    with pytest.MonkeyPatch.context() as patch, what_fits() as fits:
        patch.setattr(whole_calls, "ENABLED", False)
        ours(tensors, **options)
    return fits[0]


def assert_as_made_again(
    tensors: list[Tensor], way: int = FROM_KEPT, *, gathers: bool = False, **options: Any
) -> Trained:
    """Expect a call to go a way, and the bits of one that keeps nothing; return its results.

    gathers: whether blocks gather up weights. Their products begin at a k of the block's, so some sums round otherwise.
    """
    assert way_of(tensors, **options) == way
    out, grads = ours(tensors, **options)
    again, want = ours(tensors, **{**options, "capacity": 1})
    assert torch.equal(out.y, again.y) and torch.equal(out.fires, again.fires) and torch.equal(out.nnz, again.nnz)
    torch.testing.assert_close(out.l1, again.l1, rtol=1e-5, atol=0)
    for at, (got, other) in enumerate(zip(grads, want, strict=True)):
        mean, greatest = errors(got, other)
        same = mean <= 2**-13 and greatest <= 2**-8 if gathers else torch.equal(got, other)
        assert same, (at, mean, greatest)
    return out


def of_kind(tensors: list[Tensor], gated: bool) -> list[Tensor]:
    return tensors if gated else [*tensors[:2], tensors[3]]


@pytest.mark.parametrize("shift", [-1.0, 0.0, 60.0], ids=["a sixth", "half", "all"])
@pytest.mark.parametrize(("n", "d_model", "d_ff"), SHAPES[1:])
def test_errors_are_denses(n: int, d_model: int, d_ff: int, shift: float) -> None:
    tensors = made(n, d_model, d_ff, shift)
    assert_errors_are_denses(tensors)
    assert way_of(tensors) == FROM_KEPT


@pytest.mark.parametrize("shift", [-1.0, 0.0, 60.0], ids=["a sixth", "half", "all"])
@pytest.mark.parametrize(("n", "d_model", "d_ff"), SHAPES)
@pytest.mark.parametrize(("gated", "activation"), KINDS)
def test_gradients_are_those_of_values_made_again(
    gated: bool, activation: str, n: int, d_model: int, d_ff: int, shift: float
) -> None:
    """Bit by bit, since it is the same products of the same values."""
    assert_as_made_again(of_kind(made(n, d_model, d_ff, shift), gated), activation=activation)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("n", "d_model", "d_ff"), [(300, 264, 520), (1025, 136, 2048), (2049, 264, 1032)])
def test_a_call_is_kept_from_a_mean_on(n: int, d_model: int, d_ff: int, gated: bool) -> None:
    """Rows fire as many as that, all the same, and some of them one more; neurons lie apart, in words and in spill."""
    most = Room.of(n, d_ff, gated, d_ff).whole_from
    assert most == d_ff // 8
    many = torch.full((n,), most)
    assert way_of(of_kind(firing(many, d_model, d_ff), gated)) == SPARSE
    many[::100] += 1
    out = assert_as_made_again(of_kind(firing(many, d_model, d_ff), gated))
    assert torch.equal(out.nnz.cpu(), many.int())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("low", [0, 3, 40, 200])
def test_blocks_that_fire_much_and_others(low: int, gated: bool) -> None:
    """In windows where rows are put in order of nnz: blocks of all neurons, of any, of few and of none."""
    many = torch.where(torch.arange(2049) * 7 % 5 < 2, 1032, low) + torch.arange(2049) % 3
    out = assert_as_made_again(of_kind(firing(many.clamp(max=1032), 136, 1032), gated), gathers=gated and low < 200)
    assert torch.equal(out.nnz.cpu(), many.clamp(max=1032).int())


def test_blocks_that_fire_every_neuron_by_rows_that_fire_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their union is all neurons, as where much fires, but their values lie as words: rows are put in order, and of the
    128 that were multiplied together too few fire for a dense tile."""
    monkeypatch.setattr(hopper_compact, "WHOLE_FROM", 0.008)
    tensors = made(1025, 136, 1032, -1.45)
    with torch.no_grad():
        tensors[0][:, 0] = 2.2  # fires less, so that blocks of the others are put together
        tensors[0][::8, 0] = 1
    fired = tensors[0].float() @ tensors[1].float().t() > 0
    assert 0.06 < float(fired[:1024:8].float().mean()) < 10 / 128
    assert float(fired[:1024:8].any(0).float().mean()) > 0.99
    assert float(fired[:1024].view(-1, 128, 1032)[:, :, :1024].any(1).view(-1, 256).float().mean(1).max()) < 0.85
    assert_as_made_again(tensors)


@pytest.mark.parametrize("gated", [True, False])
def test_errors_of_unlike_blocks_are_denses(gated: bool) -> None:
    """Against float64, as what is kept and what is made again could be wrong in the same way."""
    tensors = of_kind(firing(torch.where(torch.arange(1025) % 2 > 0, 700, 9), 264, 1032), gated)
    assert way_of(tensors) == FROM_KEPT
    out, grads = ours(tensors)
    for got, want in zip([out.y, *grads], exact(tensors), strict=True):
        assert errors(got, want)[0] <= 0.01


@pytest.mark.parametrize("gated", [True, False])
def test_the_first_rows_decide(gated: bool) -> None:
    """All of a call is kept if they fire much, though others do not; else values are, if they are few enough."""
    first = torch.arange(2049) < 1024
    for many, way in (
        (torch.where(first, 400, 0), FROM_KEPT),
        (torch.where(first, 400, 10), FROM_KEPT),
        (torch.where(first, 0, 100), SPARSE),
        (torch.where(first, 100, 900), AT_ONCE),
    ):
        tensors = of_kind(firing(many, 136, 1032), gated)
        if way == SPARSE:
            assert way_of(tensors) == SPARSE
        else:
            assert_as_made_again(tensors, way, gathers=gated)


@pytest.mark.parametrize("gated", [True, False])
def test_rows_that_do_not_count(gated: bool) -> None:
    rows = (torch.arange(1300, device="cuda") % 3 != 0).to(torch.uint8)
    tensors = of_kind(made(1300, 256, 512, 0.0), gated)
    out = assert_as_made_again(tensors, rows=rows)
    assert int(out.fires.sum()) == int(out.nnz[rows != 0].sum())
    for got, want in zip(ours(tensors, rows=rows)[1], exact(tensors, rows)[1:], strict=True):
        assert errors(got, want)[0] <= 0.008


def test_l1_of_rows_that_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_compact, "WHOLE_FROM", 0.0)
    assert_l1_of_rows_that_count()


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_broken_row_stays_alone(value: float) -> None:
    """Such a call is computed in passes from x, whatever was kept."""
    tensors = made(1300, 256, 512, 0.0)
    with torch.no_grad():
        tensors[0][1207, 3] = value
    assert way_of(tensors) == PASSES
    out, grads = ours(tensors)
    assert grads[0][1207].isnan().all() and out.y[1207].isnan().all() and int(out.finite.sum()) == 1299
    others = torch.arange(1300, device="cuda") != 1207
    alone = [tensors[0].detach()[others].requires_grad_(), *tensors[1:]]
    its = train_gated_ffn(*alone, kernel="hopper")  # type: ignore[arg-type]
    along = direction(1300, 256)[others]
    want = torch.autograd.grad((its.y, its.l1), alone, (along, torch.full_like(its.l1, COEFFICIENT)))
    for got, other in zip((grads[0][others], *grads[1:]), want, strict=True):
        assert errors(got, other)[0] <= 0.008


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shift", [-1.8, 0.0, 60.0], ids=["few", "half", "all"])
def test_a_second_backward_pass_has_the_same_bits(shift: float, gated: bool) -> None:
    tensors = of_kind(made(1025, 512, 1024, shift), gated)
    out = (train_gated_ffn if gated else train_plain_ffn)(*tensors, kernel="hopper")  # type: ignore[arg-type]
    along = direction(1025, 512), torch.full_like(out.l1, COEFFICIENT)
    found = [torch.autograd.grad((out.y, out.l1), tensors, along, retain_graph=True) for _ in range(3)]
    for grads in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads, found[0], strict=True))


@pytest.mark.parametrize("gated", [True, False])
def test_values_stay_where_a_pass_makes_all_again(monkeypatch: pytest.MonkeyPatch, gated: bool) -> None:
    """A backward pass whose arena is too small for what was kept is followed by one whose arena is large enough."""
    monkeypatch.setattr(whole_calls, "ENABLED", False)
    tensors = of_kind(made(1025, 512, 1024, -1.8), gated)
    train = train_gated_ffn if gated else train_plain_ffn

    def run(out: Trained) -> tuple[Tensor, ...]:
        along = direction(1025, 512), torch.full_like(out.l1, COEFFICIENT)
        return torch.autograd.grad((out.y, out.l1), tensors, along, retain_graph=True)

    out = train(*tensors, kernel="hopper")  # type: ignore[arg-type]
    with what_fits() as fits:
        want = run(train(*tensors, kernel="hopper"))  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(hopper_compact, "ROOM", 0.0)
            patch.setattr(hopper_compact, "SMALL", 0)
            patch.setattr(hopper_compact, "PASSES", 1000)
            run(out)
        got = run(out)
    assert fits == [SPARSE, AT_ONCE, SPARSE]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_panels_lie_behind_the_values_that_were_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a call as large as that: the bits of one whose panels lie in the arena, and again in a second pass."""
    n, d_model, d_ff = 8192, 64, 5632
    monkeypatch.setattr(hopper_compact, "FORWARD_ROWS", 8192)
    room = Room.whole(n, d_ff, 2)
    assert hopper_compact.backward_layout(n, d_model, d_ff, room).sizes[6] == 6 * room.values
    tensors = made(n, d_model, d_ff, -2.6)
    assert way_of(tensors) == SPARSE
    out = train_gated_ffn(*tensors, kernel="hopper")  # type: ignore[arg-type]
    along = direction(n, d_model), torch.full_like(out.l1, COEFFICIENT)
    first, second = (torch.autograd.grad((out.y, out.l1), tensors, along, retain_graph=True) for _ in range(2))
    monkeypatch.setattr(hopper_compact, "ROOM", 1e6)
    whole_calls._remembered.clear()
    assert hopper_compact.backward_layout(n, d_model, d_ff, room).sizes[6] == 0
    for got, again, want in zip(first, second, ours(tensors)[1], strict=True):
        assert torch.equal(got, again) and torch.equal(got, want)


def test_panels_that_do_not_fit_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_compact, "FORWARD_ROWS", 8192)
    assert_as_made_again(made(8192, 64, 5632, -2.15), AT_ONCE)


def test_one_graph_when_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_compact, "WHOLE_FROM", 0.0)
    assert_one_graph()


@pytest.mark.parametrize("gated", [True, False])
def test_what_is_kept_is_less_than_dense_autograd_keeps(gated: bool) -> None:
    tensors = of_kind(made(4096, 512, 2048, 0.0), gated)
    before = torch.cuda.memory_allocated()
    out = (train_gated_ffn if gated else train_plain_ffn)(*tensors, kernel="hopper")  # type: ignore[arg-type]
    kept = torch.cuda.memory_allocated() - before - out.y.nbytes
    assert kept <= 1.05 * 4096 * 2048 * (4 if gated else 2)
