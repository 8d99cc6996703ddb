"""Training passes in a workspace sized by what is kept: what fits there, and what is computed densely instead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.gpu_checks import poison
from support.gpu_training import (
    COEFFICIENT,
    NAMES,
    ON_HOPPER,
    SHAPES,
    assert_errors_are_denses,
    assert_l1_of_rows_that_count,
    assert_masters_get_their_dtype,
    assert_one_graph,
    assert_two_streams_agree,
    dense,
    direction,
    errors,
    exact,
    made,
    ours,
    what_fits,
)

from twell.kernels.backends import hopper_compact
from twell.kernels.benchmark.synthetic import synthetic_ffn
from twell.kernels.calls import whole_calls
from twell.kernels.training import train_gated_ffn

pytestmark = ON_HOPPER


@pytest.fixture(autouse=True)
def _on(both_ways: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Switch compact passes on, with several passes of rows forward, in memory of NaN."""
    monkeypatch.setattr(whole_calls, "_remembered", {})
    monkeypatch.setattr(hopper_compact, "ENABLED", True)
    monkeypatch.setattr(hopper_compact, "FORWARD_ROWS", 1024)
    poison()
    yield
    whole_calls._remembered.clear()


@pytest.fixture(
    params=["room for all", "as chosen", "nothing fits", "nothing kept fits, many passes", "at once", "all kept"]
)
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Each size of what is kept and of the arena; options of the calls."""
    monkeypatch.setattr(hopper_compact, "AT_ONCE", request.param in ("at once", "all kept"))
    if request.param == "all kept":
        monkeypatch.setattr(hopper_compact, "WHOLE_FROM", 0.0)
        return {}
    if request.param == "room for all":
        monkeypatch.setattr(hopper_compact, "ROOM", 1e6)
        return {"capacity": 2**14}
    if request.param == "as chosen":
        return {}
    if request.param == "nothing kept fits, many passes":
        fewest(monkeypatch)
    if request.param == "at once":
        monkeypatch.setattr(hopper_compact, "ROOM", 1e6)
    return {"capacity": 1}


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute what does not fit at once, in an arena that has room for it."""
    monkeypatch.setattr(hopper_compact, "AT_ONCE", True)
    monkeypatch.setattr(hopper_compact, "ROOM", 1e6)


def fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the arena as little as `PASSES` passes need."""
    monkeypatch.setattr(hopper_compact, "ROOM", 0.0)
    monkeypatch.setattr(hopper_compact, "SMALL", 0)


@pytest.mark.parametrize("shift", [-60.0, -2.2, 60.0], ids=["all dead", "sparse", "all alive"])
@pytest.mark.parametrize(("n", "d_model", "d_ff"), SHAPES)
def test_errors_are_denses(room: dict[str, Any], n: int, d_model: int, d_ff: int, shift: float) -> None:
    assert_errors_are_denses(made(n, d_model, d_ff, shift), **room)


def test_what_fits_takes_the_sparse_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else does: not where values were left out, nor where the arena is too small for panels and chunks."""
    monkeypatch.setattr(whole_calls, "ENABLED", False)
    tensors = made(1025, 512, 1024, -2.2)
    monkeypatch.setattr(hopper_compact, "AT_ONCE", False)
    monkeypatch.setattr(hopper_compact, "ROOM", 1e6)
    with what_fits() as fits:
        ours(tensors, capacity=1024)
        ours(tensors, capacity=1)
        fewest(monkeypatch)
        ours(tensors, capacity=1024)
    assert fits == [1, 0, 0]


def test_which_calls_are_dense_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose rows are all finite, in an arena with room for all values, and what does not fit alone."""
    monkeypatch.setattr(whole_calls, "ENABLED", False)
    tensors = made(1025, 512, 1024, -1.0)
    at_once(monkeypatch)
    with what_fits() as fits:
        ours(tensors, capacity=1)
        ours(tensors, capacity=512)
        x, gate, _, down = tensors
        ours([x, gate, down], capacity=1)
        with torch.no_grad():
            x[7] = torch.nan
        ours(tensors, capacity=1)
    assert fits == [-1, 1, -1, 0]


@pytest.mark.parametrize("first", [True, False])
def test_the_first_rows_tell_whether_all_will_fit(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """If the first ones are those that fire, nothing is kept, though all would fit; the gradients are the same."""
    monkeypatch.setattr(whole_calls, "ENABLED", False)
    at_once(monkeypatch)
    tensors = made(2049, 512, 1024, 1.0)  # some 860 neurons a row, of half of the rows
    with torch.no_grad():
        tensors[0][slice(1024, None) if first else slice(0, 1025), 0] = -40
    with what_fits() as fits:
        _, grads = ours(tensors, capacity=512)
    assert fits == [-1 if first else 1]
    monkeypatch.setattr(hopper_compact, "ENABLED", False)
    _, want = ours(tensors, capacity=1024)
    for name, got, its in zip(NAMES, grads, want, strict=True):
        assert errors(got, its)[0] <= 0.008, name


@pytest.mark.parametrize("shift", [-1.0, 60.0], ids=["some", "all alive"])
def test_gradients_at_once_are_the_worst_cases(monkeypatch: pytest.MonkeyPatch, shift: float) -> None:
    """But for the order of sums and one rounding of dh; rows, neurons and outputs fill no tile."""
    for n, d_model, d_ff in ((1025, 512, 1024), (300, 264, 520), (2049, 136, 1032)):
        tensors = made(n, d_model, d_ff, shift)
        at_once(monkeypatch)
        _, grads = ours(tensors, capacity=1)
        with monkeypatch.context() as patch:
            patch.setattr(hopper_compact, "ENABLED", False)
            _, want = ours(tensors, capacity=1)
        for name, got, its in zip(NAMES, grads, want, strict=True):
            assert errors(got, its)[0] <= 0.008, (name, n, d_model, d_ff)


def test_same_call_same_bits(room: dict[str, Any]) -> None:
    tensors = made(4097, 1024, 2816)
    first, second = ours(tensors, **room)[1], ours(tensors, **room)[1]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_what_is_in_memory_changes_nothing(room: dict[str, Any]) -> None:
    tensors = made(1025, 512, 1024)
    first = ours(tensors, **room)[1]
    torch.cuda.empty_cache()
    zeros = [torch.zeros(2**26, device="cuda") for _ in range(8)]
    del zeros  # what is allocated next lies there
    assert all(torch.equal(a, b) for a, b in zip(first, ours(tensors, **room)[1], strict=True))


@pytest.mark.parametrize("shift", [-2.2, -1.0])
def test_what_fits_has_the_bits_of_the_worst_cases_workspace(monkeypatch: pytest.MonkeyPatch, shift: float) -> None:
    """Of one forward pass for all rows: the products are the same, in another place."""
    tensors = made(4097, 512, 1024, shift)
    monkeypatch.setattr(hopper_compact, "FORWARD_ROWS", 8192)
    monkeypatch.setattr(hopper_compact, "ROOM", 1e6)
    out, grads = ours(tensors, capacity=512)
    monkeypatch.setattr(hopper_compact, "ENABLED", False)
    other, want = ours(tensors, capacity=512)
    for name, got, its in zip(("y", "l1", "fires", *NAMES), (out.y, out.l1, out.fires, *grads),
                              (other.y, other.l1, other.fires, *want), strict=True):  # fmt: skip
        assert torch.equal(got, its), name


def test_counts_of_passes_add_up() -> None:
    tensors = made(2049, 512, 2048)
    rows = (torch.arange(2049, device="cuda") % 3 != 0).to(torch.uint8)
    out, _ = ours(tensors, rows=rows)
    plain = train_gated_ffn(*tensors, rows=rows, kernel="reference")  # type: ignore[arg-type]
    torch.testing.assert_close(out.l1, plain.l1, rtol=1e-3, atol=0)
    assert (out.nnz - plain.nnz).abs().max() <= 1 and (out.fires - plain.fires).abs().max() <= 1
    assert int(out.nnz[rows != 0].sum()) == int(out.fires.sum())


def test_rows_that_do_not_count(room: dict[str, Any]) -> None:
    tensors = made(700, 256, 512)
    rows = (torch.arange(700, device="cuda") % 3 != 0).to(torch.uint8)
    _, grads = ours(tensors, rows=rows, **room)
    for name, got, loose, want, all_count in zip(
        NAMES, grads, dense(tensors)[1:], exact(tensors, rows)[1:], exact(tensors)[1:], strict=True
    ):
        assert errors(got, want)[0] <= 1.25 * errors(loose, all_count)[0] + 1e-6, name


def test_l1_of_rows_that_count(room: dict[str, Any]) -> None:
    assert_l1_of_rows_that_count(**room)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_broken_row_stays_alone(room: dict[str, Any], value: float) -> None:
    tensors = made(1300, 256, 512)
    clean = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    with torch.no_grad():
        tensors[0][1207, 3] = value  # so that inf fires
        clean[0][1207, 0] = 1e4  # fires nowhere
        clean[0][1207, 1:] = 0
    out, grads = ours(tensors, **room)
    assert not out.finite[1207] and int(out.finite.sum()) == 1299
    assert grads[0][1207].isnan().all() and out.y[1207].isnan().all()
    others = torch.arange(1300, device="cuda") != 1207
    for got, want in zip((grads[0][others], *grads[1:]), (exact(clean)[1][others], *exact(clean)[2:]), strict=True):
        assert errors(got, want)[0] <= 0.02  # and one row in 1 300 counts less in l1


def test_float32_masters_get_float32_gradients(room: dict[str, Any]) -> None:
    assert_masters_get_their_dtype(**room)


def test_down_weights_by_neuron_give_the_same_bits(room: dict[str, Any]) -> None:
    tensors = made(300, 264, 520)
    turned = [*tensors[:3], tensors[3].detach().t().contiguous().t().requires_grad_()]
    one, other = ours(tensors, **room), ours(turned, **room)
    for value, its in zip((one[0].y, *one[1]), (other[0].y, *other[1]), strict=True):
        assert torch.equal(value, its)


@pytest.mark.parametrize(("gated", "activation"), [(False, "relu"), (True, "relu2"), (False, "relu2")])
def test_other_kinds_agree_with_the_worst_cases_workspace(
    monkeypatch: pytest.MonkeyPatch, room: dict[str, Any], gated: bool, activation: str
) -> None:
    x, gate, up, down = made(1025, 512, 1024)
    tensors = [x, gate, up, down] if gated else [x, gate, down]
    found = []
    for enabled in (False, True):
        monkeypatch.setattr(hopper_compact, "ENABLED", enabled)
        out, grads = ours(tensors, activation=activation, **room)
        found.append([out.y, *grads])
    for at, (want, got) in enumerate(zip(*found, strict=True)):
        assert errors(got, want)[0] <= 0.015, at


@pytest.mark.parametrize("capacity", [None, 1])
def test_one_graph_when_compiled(capacity: int | None) -> None:
    assert_one_graph(capacity=capacity)


def test_two_streams(room: dict[str, Any]) -> None:
    assert_two_streams_agree(**room)


@pytest.mark.parametrize("capacity", [44, 1])
def test_a_block_at_full_size(monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    """16 384 rows of 2048 x 5632 at nnz 17: memory, and errors of both ways, dense in passes."""
    monkeypatch.setattr(hopper_compact, "AT_ONCE", False)
    monkeypatch.setattr(hopper_compact, "FORWARD_ROWS", 8192)
    ffn, x = synthetic_ffn("heavy", 16_384, 2048, 5632, nnz=17, dtype=torch.bfloat16, device="cuda")
    tensors = [t.detach().contiguous().requires_grad_() for t in (x, ffn.w_gate, ffn.w_up, ffn.w_down)]  # type: ignore[union-attr]
    if not whole_calls.ENABLED:
        with what_fits() as fits:
            ours(tensors, capacity=capacity)
        assert fits == [capacity == 44]
    along = direction(16_384, 2048)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = train_gated_ffn(*tensors, kernel="hopper", capacity=capacity)  # type: ignore[arg-type]
    grads = torch.autograd.grad((out.y, out.l1), tensors, (along, torch.full_like(out.l1, COEFFICIENT)))
    assert torch.cuda.max_memory_allocated() - before <= 0.40 * 2**30
    assert all(grad.isfinite().all() for grad in grads)
    del grads, out
    assert_errors_are_denses(tensors, capacity=capacity)
