"""The training passes of plain FFNs and of ReLU squared on Hopper: their errors are those of dense bfloat16."""

from __future__ import annotations

import pytest
import torch
from support.gpu_checks import poison
from support.gpu_training import ON_HOPPER, errors, exact, gradients, made, ours
from torch import Tensor

from twell.kernels.benchmark.training import dense_forward
from twell.kernels.training import choose

pytestmark = ON_HOPPER
KINDS = [(False, "relu"), (True, "relu2"), (False, "relu2")]
SHAPES = [(1, 256, 512), (131, 136, 1032), (1025, 512, 1024), (9000, 256, 1032)]  # the last one: more than 64 blocks
SINGLE_ROWS = 40


@pytest.fixture(autouse=True)
def _on(both_ways: None) -> None:
    """Train in memory of NaN."""
    poison()


def tensors_of(gated: bool, n: int, d_model: int, d_ff: int, shift: float, seed: int = 0) -> list[Tensor]:
    x, gate, up, down = made(n, d_model, d_ff, shift, seed)
    return [x, gate, up, down] if gated else [x, gate, down]


@pytest.mark.parametrize("shift", [-60.0, -2.2, -1.0, 60.0], ids=["all dead", "sparse", "some", "all alive"])
@pytest.mark.parametrize(("n", "d_model", "d_ff"), SHAPES)
@pytest.mark.parametrize(("gated", "activation"), KINDS)
def test_errors_are_denses(gated: bool, activation: str, n: int, d_model: int, d_ff: int, shift: float) -> None:
    options = {"gated": gated, "activation": activation}
    assert choose("cuda", torch.bfloat16, d_model, d_ff, n, **options).kernel == "hopper"  # type: ignore[arg-type]
    names = ("y", "x", "w_gate", "w_up", "w_down") if gated else ("y", "x", "w_in", "w_out")
    draws = [  # the error of one row is a draw: of single rows, the mean of many counts
        errors_beside_denses(activation, tensors_of(gated, n, d_model, d_ff, shift, seed))
        for seed in range(SINGLE_ROWS if n == 1 else 1)
    ]
    for name, ours_mean, ours_most, denses_mean, denses_most in zip(names, *torch.tensor(draws).mean(0).T, strict=True):
        assert ours_mean <= 1.25 * denses_mean + 1e-6, (name, ours_mean, denses_mean)
        assert ours_most <= 2 * denses_most + 1e-6, (name, ours_most, denses_most)


def errors_beside_denses(activation: str, tensors: list[Tensor]) -> list[tuple[float, ...]]:
    """Return, of y and each gradient, our mean and largest row's error against float64, then those of dense."""
    out, grads = ours(tensors, activation=activation)
    y, l1 = dense_forward(activation, *tensors)
    torch.testing.assert_close(out.l1, l1, rtol=1e-2, atol=1e-6)
    assert all(got.isfinite().all() for got in (out.y, *grads))
    loose, want = [y, *gradients(y, l1, tensors)], exact(tensors, activation=activation)
    return [
        (*errors(got, true), *errors(other, true))
        for got, other, true in zip([out.y, *grads], loose, want, strict=True)
    ]


@pytest.mark.usefixtures("worst_case")
@pytest.mark.parametrize(("gated", "activation"), KINDS)
def test_what_is_not_kept_is_computed_again(gated: bool, activation: str) -> None:
    tensors = tensors_of(gated, 1025, 512, 1024, -1.0)
    whole, want = ours(tensors, activation=activation, capacity=1024)
    for capacity in (64, 1):
        out, grads = ours(tensors, activation=activation, capacity=capacity)
        assert torch.equal(out.y, whole.y) and torch.equal(out.fires, whole.fires)
        assert all(torch.equal(got, other) for got, other in zip(grads, want, strict=True))


@pytest.mark.parametrize(("gated", "activation"), KINDS)
def test_a_broken_row_stays_alone(gated: bool, activation: str) -> None:
    tensors = tensors_of(gated, 300, 256, 512, -1.5)
    with torch.no_grad():
        tensors[0][7] = torch.inf
    out, grads = ours(tensors, activation=activation)
    assert not out.finite[7] and int(out.finite.sum()) == 299
    assert grads[0][7].isnan().all() and all(grad.isfinite().all() for grad in (grads[0][8:], *grads[1:]))
