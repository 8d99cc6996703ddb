"""Gradients of the FFN op in plain torch, on any device: what every other backward pass is compared with.

With z = x Wg' + bg, u = x Wu' + bu, g = act(z) and h = g * u where z > 0 (0 elsewhere), y = h Wd' + bd and
l1 = sum |h| / counted rows. Let c be the gradient of l1 divided by those rows. Only where z > 0:

    dh = dy Wd + c sign(h)      du = dh * g      dz = dh * u * act'(z)
    dx = du Wu + dz Wg          dWd' = h' dy     dWu = du' x      dWg = dz' x

and biases get the sums over rows. A plain FFN has no u: dz = dh * act'(z). act' is 1 for ReLU and 2 z for its square.

The forward pass saves z and u where a neuron fired, and zeros elsewhere. A row with inf or nan among its gate or hidden
values comes out NaN in y and in dx; it adds nothing to l1 or to the gradients of the weights.

Cost: six dense products backward. Operands of 16 bits are rounded as dense autograd rounds them; products keep float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

ROWS = 2**13  # rows at a time, so that the widened copies of 16-bit operands stay small
LEAST = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}  # least positive numbers, which a fired gate keeps


class Weights(NamedTuple):
    """The op's parameters in the dtype of x; `up` is None in a plain FFN. Shapes as in `train_gated_ffn`."""

    gate: Tensor
    up: Tensor | None
    down: Tensor
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None


class GradientSums(NamedTuple):
    """Tensors to which a backward pass adds the gradients of the weights, of their shapes; or none at all.

    gate, up, down: float32, or of the weights' dtype; `up` is None in a plain FFN
    """

    gate: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None


NO_SUMS = GradientSums()


class Saved(NamedTuple):
    """Values a backward pass needs beside x: gate pre-activations and up values, [n, d_ff], 0 where nothing fired.

    up: [0, 0] in a plain FFN; counted: float [n], 1 where a row enters l1, else 0; finite: bool [n]
    """

    gate: Tensor
    up: Tensor
    counted: Tensor
    finite: Tensor


class ForwardResults(NamedTuple):
    """Results of a forward pass: y [n, d_model], l1 [], nnz int32 [n], fires int64 [d_ff], and the saved values."""

    y: Tensor
    l1: Tensor
    nnz: Tensor
    fires: Tensor
    saved: Saved


class Gradients(NamedTuple):
    """Gradients in the order of the op's arguments; None for what a call does not have, and what was added to sums."""

    x: Tensor
    gate: Tensor | None
    up: Tensor | None
    down: Tensor | None
    b_gate: Tensor | None
    b_up: Tensor | None
    b_down: Tensor | None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are kept in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two matrices of one dtype; 16-bit operands give float32 that was never rounded to 16 bits."""
    if a.element_size() > 2:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def activate(z: Tensor, activation: str) -> Tensor:
    """Return the activation of pre-activations that are positive or zero."""
    return z if activation == "relu" else z.square()


def forward(x: Tensor, weights: Weights, rows: Tensor | None, activation: str) -> ForwardResults:
    """Compute y, l1 and the counts of x [n, d_model], and save what the backward pass needs."""
    parts = [
        _forward_rows(x[at : at + ROWS], weights, None if rows is None else rows[at : at + ROWS], activation)
        for at in range(0, max(len(x), 1), ROWS)
    ]
    if len(parts) == 1:
        return parts[0]._replace(l1=_mean(parts[0].l1, parts[0].saved.counted))
    saved = Saved(*(torch.cat(tensors) for tensors in zip(*(part.saved for part in parts), strict=True)))
    return ForwardResults(
        torch.cat([part.y for part in parts]),
        _mean(torch.stack([part.l1 for part in parts]).sum(), saved.counted),
        torch.cat([part.nnz for part in parts]),
        torch.stack([part.fires for part in parts]).sum(0),
        saved,
    )


def _mean(total: Tensor, counted: Tensor) -> Tensor:
    """Divide a sum over counted rows by their number; 0 where no row counts."""
    return total / counted.sum().clamp(min=1)


def _forward_rows(x: Tensor, weights: Weights, rows: Tensor | None, activation: str) -> ForwardResults:
    """Compute some rows; `l1` is their sum of |h| here."""
    z = _linear(x, weights.gate, weights.b_gate)
    fired = z > 0
    gate = torch.where(fired, z.clamp(min=LEAST.get(x.dtype, 0)), 0).to(x.dtype)
    hidden, up = activate(gate.to(z.dtype), activation).to(x.dtype), x.new_empty(0, 0)
    if weights.up is not None:
        up = torch.where(fired, _linear(x, weights.up, weights.b_up), 0).to(x.dtype)
        hidden = (hidden.to(z.dtype) * up.to(z.dtype)).to(x.dtype)
    finite = z.isfinite().all(1) & hidden.isfinite().all(1)
    y = _linear(hidden, weights.down, weights.b_down).masked_fill(~finite[:, None], torch.nan).to(x.dtype)
    kept = fired & finite[:, None]
    counted = finite if rows is None else finite & (rows != 0)
    magnitude = torch.where(kept & counted[:, None], hidden.to(z.dtype).abs(), 0)
    zero = torch.zeros((), dtype=x.dtype, device=x.device)
    saved = Saved(
        torch.where(kept, gate, zero), torch.where(kept, up, zero) if up.numel() else up, counted.to(z.dtype), finite
    )
    return ForwardResults(y, magnitude.sum(), kept.sum(1).int(), (kept & counted[:, None]).sum(0), saved)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W' + b in the dtype of sums."""
    z = product(x, weight.t())
    return z if bias is None else z + bias.to(z.dtype)


def backward(
    x: Tensor, weights: Weights, saved: Saved, activation: str, grad_y: Tensor, grad_l1: Tensor, dtype: torch.dtype,
    into: GradientSums = NO_SUMS,
) -> Gradients:  # fmt: skip
    """Compute all gradients.

    grad_y: [n, d_model], as y; grad_l1: [], the gradient of l1; dtype: what the weights' gradients come in
    into: where those of the weights are added instead
    """
    sums: list[Tensor | None] = []
    dx = []
    scale = grad_l1.to(saved.counted.dtype) / saved.counted.sum().clamp(min=1)
    for at in range(0, max(len(x), 1), ROWS):
        some = slice(at, at + ROWS)
        part = Saved(saved.gate[some], saved.up[some], saved.counted[some], saved.finite[some])
        grads = _backward_rows(x[some], weights, part, activation, grad_y[some], scale)
        dx.append(grads.x)
        sums = [_added(*pair) for pair in zip(sums, grads[1:], strict=True)] if sums else [*grads[1:]]
    targets = (*into, None, None, None)
    return Gradients(torch.cat(dx), *(delivered(*pair, dtype) for pair in zip(sums, targets, strict=True)))


def delivered(total: Tensor | None, target: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a gradient in a dtype; or add it to a tensor that was given for it, and return None."""
    if total is None or target is None:
        return None if total is None else total.to(dtype)
    target.add_(total)
    return None


def _added(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Add two sums, or two that the call does not have."""
    return None if a is None or b is None else a + b


def _backward_rows(
    x: Tensor, weights: Weights, saved: Saved, activation: str, grad_y: Tensor, scale: Tensor
) -> Gradients:
    """Compute dx of some rows, and their sums for the weights. scale: [], the gradient of l1 by the counted rows."""
    gated, total, finite = weights.up is not None, wide(x.dtype), saved.finite[:, None]
    fired = saved.gate > 0
    z, u = saved.gate.to(total), saved.up.to(total)
    value = activate(z, activation).to(x.dtype).to(total)
    hidden = (value * u).to(x.dtype) if gated else value.to(x.dtype)
    given = grad_y.masked_fill(~finite, 0)  # such rows have NaN outputs, whose gradients mean nothing
    dh = product(given, weights.down) + (scale * saved.counted)[:, None] * hidden.to(total).sign()
    dh = torch.where(fired, dh, 0)
    dz = dh * (u if gated else 1)
    dz = (dz if activation == "relu" else 2 * z * dz).to(x.dtype)
    inputs = x.masked_fill(~finite, 0)
    dx = product(dz, weights.gate)
    d_up, db_up = None, None
    if weights.up is not None:
        du = (dh * value).to(x.dtype)
        dx = dx + product(du, weights.up)
        d_up = product(du.t(), inputs)
        db_up = None if weights.b_up is None else du.sum(0, dtype=total)
    return Gradients(
        dx.masked_fill(~finite, torch.nan).to(x.dtype),
        product(dz.t(), inputs),
        d_up,
        product(given.t(), hidden),
        None if weights.b_gate is None else dz.sum(0, dtype=total),
        db_up,
        None if weights.b_down is None else given.sum(0, dtype=total),
    )


def dense_loss_reference(x: Tensor, weights: Weights, activation: str) -> tuple[Tensor, Tensor]:
    """Return y and l1 by operations that autograd follows itself: an oracle for tests, in the dtype of x."""
    gate = activate(functional.linear(x, weights.gate, weights.b_gate).relu(), activation)
    hidden = gate if weights.up is None else gate * functional.linear(x, weights.up, weights.b_up)
    return functional.linear(hidden, weights.down, weights.b_down), hidden.abs().sum() / max(len(x), 1)
