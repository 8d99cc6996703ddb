"""Training calls on a Hopper GPU: random ones, their gradients by our kernels, and the errors of a matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twell.kernels.training import Trained, train_gated_ffn

NAMES = ("x", "w_gate", "w_up", "w_down")
COEFFICIENT = 0.7


def made(n: int, d_model: int, d_ff: int, shift: float = -1.5, seed: int = 0) -> list[Tensor]:
    """Random x and weights that need gradients, in bfloat16; `shift` moves all gates: their column 0 meets ones."""
    source = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=source, device="cuda") * scale

    x, gate = normal(n, d_model), normal(d_ff, d_model, scale=d_model**-0.5)
    x[:, 0], gate[:, 0] = 1, shift
    tensors = [x, gate, normal(d_ff, d_model, scale=d_model**-0.5), normal(d_model, d_ff, scale=d_ff**-0.5)]
    return [tensor.bfloat16().requires_grad_() for tensor in tensors]


def direction(n: int, d_model: int) -> Tensor:
    return torch.randn(n, d_model, generator=torch.Generator("cuda").manual_seed(5), device="cuda").bfloat16()


def ours(tensors: list[Tensor], **options: Any) -> tuple[Trained, list[Tensor]]:
    out = train_gated_ffn(*tensors, kernel="hopper", **options)  # type: ignore[arg-type]
    grads = torch.autograd.grad(
        (out.y, out.l1), tensors, (direction(*tensors[0].shape), torch.full_like(out.l1, COEFFICIENT))
    )
    return out, list(grads)


def errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Return the mean and the largest row's error, relative to the mean size of a row."""
    got, want = got.double(), want.double()
    off = (got - want).norm(dim=1) / want.norm(dim=1).mean().clamp(min=1e-30)
    return float(off.mean()), float(off.max())
