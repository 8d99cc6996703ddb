"""Random calls of the op with gradients, and what autograd makes of the same dense formula."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twell.kernels.backends.reference_backward import Weights, dense_loss_reference
from twell.kernels.training import Trained, train_gated_ffn, train_plain_ffn

Tensors = dict[str, Tensor]
COEFFICIENT = 0.3  # of l1 in the losses here


def random_ffn(
    n: int, d_model: int, d_ff: int, *, gated: bool = True, biased: bool = True, shift: float = 0.0, seed: int = 0,
    dtype: torch.dtype = torch.float64, masters: torch.dtype | None = None,
) -> Tensors:  # fmt: skip
    """Random arguments that need gradients; `shift` moves the gates' biases, so that more or fewer neurons fire."""
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0, kind: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=source, dtype=torch.float64) * scale
        return drawn.to(kind or masters or dtype).requires_grad_()

    first, last = ("w_gate", "w_down") if gated else ("w_in", "w_out")
    tensors = {"x": normal(n, d_model, kind=dtype), first: normal(d_ff, d_model, scale=d_model**-0.5)}
    if gated:
        tensors["w_up"] = normal(d_ff, d_model, scale=d_model**-0.5)
    tensors[last] = normal(d_model, d_ff, scale=d_ff**-0.5)
    if biased:
        tensors["b_gate" if gated else "b_in"] = (normal(d_ff).detach() + shift).requires_grad_()
        tensors["b_down" if gated else "b_out"] = normal(d_model)
        if gated:
            tensors["b_up"] = normal(d_ff)
    return tensors


def train_ffn(tensors: Tensors, **options: Any) -> Trained:
    return (train_gated_ffn if "w_gate" in tensors else train_plain_ffn)(**tensors, **options)


def weights_of(tensors: Tensors) -> Weights:
    if "w_gate" in tensors:
        names = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")
    else:
        names = ("w_in", "", "w_out", "b_in", "", "b_out")
    return Weights(*(tensors.get(name) for name in names))  # type: ignore[arg-type]


def gradients(tensors: Tensors, y: Tensor, l1: Tensor) -> dict[str, Tensor]:
    """Return the gradients of a loss of y and l1, by name."""
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y.dtype)
    loss = (y * direction).sum() + COEFFICIENT * l1
    return dict(zip(tensors, torch.autograd.grad(loss, list(tensors.values())), strict=True))


def expected(tensors: Tensors, activation: str = "relu") -> dict[str, Tensor]:
    """Return the gradients that autograd finds in float64 on its own."""
    doubled = {name: tensor.detach().double().requires_grad_() for name, tensor in tensors.items()}
    y, l1 = dense_loss_reference(doubled["x"], weights_of(doubled), activation)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loss = (y * direction.to(tensors["x"].dtype).double()).sum() + COEFFICIENT * l1
    return dict(zip(doubled, torch.autograd.grad(loss, list(doubled.values())), strict=True))


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.isfinite().all(), name
        error = (tensor.double() - want[name]).norm() / want[name].norm().clamp(min=1e-30)
        assert error <= tolerance, (name, float(error))
