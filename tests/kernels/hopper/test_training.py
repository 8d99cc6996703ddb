"""The training passes on Hopper in the workspace of the worst case: rows' mean errors against float64 are at most 1.25
times those of dense bfloat16."""

from __future__ import annotations

import pytest
import torch
from support.gpu_training import (
    NAMES,
    ON_HOPPER,
    SHAPES,
    assert_errors_are_denses,
    assert_l1_of_rows_that_count,
    assert_masters_get_their_dtype,
    assert_one_graph,
    assert_two_streams_agree,
    dense,
    errors,
    exact,
    made,
    ours,
)

from twell.kernels.training import choose, train_gated_ffn

pytestmark = [*ON_HOPPER, pytest.mark.usefixtures("both_ways", "worst_case")]


@pytest.mark.parametrize("shift", [-60.0, -2.2, -1.0, 60.0], ids=["all dead", "sparse", "some", "all alive"])
@pytest.mark.parametrize(("n", "d_model", "d_ff"), SHAPES)
def test_errors_are_denses(n: int, d_model: int, d_ff: int, shift: float) -> None:
    out = assert_errors_are_denses(made(n, d_model, d_ff, shift))
    if abs(shift) > 50:
        assert int(out.nnz.sum()) == int(out.fires.sum()) == (n * d_ff if shift > 0 else 0)


def test_counts_are_the_forward_passs() -> None:
    tensors = made(2049, 512, 2048)
    out, _ = ours(tensors)
    plain = train_gated_ffn(*tensors, kernel="reference")  # type: ignore[arg-type]
    torch.testing.assert_close(out.l1, plain.l1, rtol=1e-3, atol=0)
    assert (out.nnz - plain.nnz).abs().max() <= 1 and (out.fires - plain.fires).abs().max() <= 1
    assert int(out.nnz.sum()) == int(out.fires.sum())


def test_same_call_same_bits() -> None:
    tensors = made(4097, 1024, 2816)
    first, second = ours(tensors)[1], ours(tensors)[1]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("shift", "fits"), [(-2.2, True), (-1.0, False), (60.0, False)])
@pytest.mark.parametrize(("n", "d_model", "d_ff"), [(1, 256, 512), (1025, 512, 1024), (4097, 1024, 2816)])
def test_what_is_not_kept_is_computed_again(n: int, d_model: int, d_ff: int, shift: float, fits: bool) -> None:
    """All gradients are the same bits whether values were kept, copied, or made a second time."""
    tensors = made(n, d_model, d_ff, shift)
    whole, want = ours(tensors, capacity=d_ff)
    for capacity in (d_ff // 16, 1):
        assert not fits or capacity == 1 or int(whole.nnz.sum()) <= n * capacity or n == 1
        out, grads = ours(tensors, capacity=capacity)
        assert torch.equal(out.y, whole.y) and torch.equal(out.fires, whole.fires) and torch.equal(out.l1, whole.l1)
        for name, got, other in zip(NAMES, grads, want, strict=True):
            assert torch.equal(got, other), (name, capacity)


def test_memory_follows_the_capacity() -> None:
    tensors = made(4096, 512, 2048, -2.2)
    sizes = []
    for capacity in (2048, 64):
        before = torch.cuda.memory_allocated()
        out = train_gated_ffn(*tensors, kernel="hopper", capacity=capacity)  # type: ignore[arg-type]
        sizes.append(torch.cuda.memory_allocated() - before)
        del out
    assert sizes[0] - sizes[1] >= 0.9 * 4096 * 6 * (2048 - 64)  # an allocation may take a block that is a little larger


def test_poisoned_memory_changes_nothing() -> None:
    tensors = made(1025, 512, 1024)
    first = ours(tensors)[1]
    torch.cuda.empty_cache()
    poison = [torch.full((2**26,), torch.nan, device="cuda") for _ in range(8)]
    del poison  # what is allocated next lies there
    assert all(torch.equal(a, b) for a, b in zip(first, ours(tensors)[1], strict=True))


def test_rows_that_do_not_count() -> None:
    tensors = made(700, 256, 512)
    rows = (torch.arange(700, device="cuda") % 3 != 0).to(torch.uint8)
    out, grads = ours(tensors, rows=rows)
    for name, got, loose, want in zip(
        ("y", *NAMES), [out.y, *grads], dense(tensors), exact(tensors, rows), strict=True
    ):
        assert errors(got, want)[0] <= 1.25 * errors(loose, exact(tensors)[("y", *NAMES).index(name)])[0] + 1e-6, name
    assert int(out.fires.sum()) == int(out.nnz[rows != 0].sum())


def test_l1_of_rows_that_count() -> None:
    assert_l1_of_rows_that_count()


def test_a_broken_row_stays_alone() -> None:
    tensors = made(300, 256, 512)
    with torch.no_grad():
        tensors[0][7] = torch.inf
    out, grads = ours(tensors)
    assert not out.finite[7] and int(out.finite.sum()) == 299
    assert grads[0][7].isnan().all() and all(grad.isfinite().all() for grad in (grads[0][8:], *grads[1:]))


def test_float32_masters_get_float32_gradients() -> None:
    assert_masters_get_their_dtype()


def test_one_graph_when_compiled() -> None:
    assert_one_graph()


def test_two_streams() -> None:
    assert_two_streams_agree()


def test_what_it_refuses_goes_to_the_reference_with_the_reason() -> None:
    assert choose("cuda", torch.bfloat16, 256, 512, 64).kernel == "hopper"
    choice = choose("cuda", torch.float16, 256, 512, 64)
    assert choice.kernel == "reference" and "expected bfloat16" in choice.reason


@pytest.mark.parametrize("masters", [torch.bfloat16, torch.float32])
def test_down_weights_by_neuron_give_the_same_bits(masters: torch.dtype) -> None:
    """Sizes are no multiples of the squares that are transposed; a gradient lies as its weight does."""
    tensors = made(300, 264, 520)
    tensors[1:] = [tensor.detach().to(masters).requires_grad_() for tensor in tensors[1:]]
    turned = [*tensors[:3], tensors[3].detach().t().contiguous().t().requires_grad_()]
    one, other = ours(tensors), ours(turned)
    for value, its in zip((one[0].y, *one[1]), (other[0].y, *other[1]), strict=True):
        assert torch.equal(value, its)
    assert one[1][3].stride() == tensors[3].stride() and other[1][3].stride() == turned[3].stride()


def test_the_gradient_of_l1_keeps_its_sign() -> None:
    tensors = made(300, 264, 520)
    out = train_gated_ffn(*tensors, kernel="hopper")  # type: ignore[arg-type]
    ones = torch.ones_like(out.l1)
    plus, minus = (torch.autograd.grad(out.l1, tensors, sign * ones, retain_graph=True) for sign in (1, -1))
    for name, one, other in zip(NAMES, plus, minus, strict=True):
        assert one.any() or name == "w_down", name  # which y alone depends on
        assert torch.equal(one, -other), name
