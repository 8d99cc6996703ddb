"""The trainable FFN as two torch ops, `twell::ffn_forward` and `twell::ffn_backward`, joined by autograd.

torch.compile traces each op as one node, through the fake kernels here, so that a model stays one graph. The forward op
returns the tensors that the backward op reads (`kept`), which autograd then owns: activation checkpointing drops them
and runs the forward op again. With `save` False it returns empty ones.

A way to run the two ops is a `Backend`; `training.py` names one for each call and states why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twell.kernels.backends import hopper_backward, reference_backward
from twell.kernels.backends.reference_backward import (
    NO_SUMS,
    ForwardResults,
    Gradients,
    GradientSums,
    Saved,
    Weights,
    wide,
)

KEPT = 6  # tensors that a backend may keep for its backward pass beside x
NO_SECOND_PASS = "backward: expected one backward pass, got create_graph=True, as the FFN op has no second one"
WEIGHTS = slice(1, 7)  # the weights and biases among the inputs of the ops
OpOutputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Backend:
    """A way to run both passes.

    forward(x, weights, rows, activation, save, capacity): (ForwardResults without saved values, finite bool [n], kept
    tensors); weights may be float32 masters beside a 16-bit x
    backward(x, weights, (finite, *kept), activation, grad_y, grad_l1, dtype, sums): Gradients, the weights' ones in
    `dtype`, or added to `sums`
    kept(x, weights, rows, save, capacity): unwritten tensors of the shapes and dtypes that `forward` keeps, for fake
    tensors
    """

    forward: Callable[
        [Tensor, Weights, Tensor | None, str, bool, int], tuple[ForwardResults, Tensor, tuple[Tensor, ...]]
    ]
    backward: Callable[[Tensor, Weights, tuple[Tensor, ...], str, Tensor, Tensor, torch.dtype, GradientSums], Gradients]
    kept: Callable[[Tensor, Weights, Tensor | None, bool, int], tuple[Tensor, ...]]


def _reference_forward(
    x: Tensor, weights: Weights, rows: Tensor | None, activation: str, save: bool, capacity: int
) -> tuple[ForwardResults, Tensor, tuple[Tensor, ...]]:
    results = reference_backward.forward(x, _rounded(weights, x.dtype), rows, activation)
    gate, up, counted, finite = results.saved
    return results, finite, (gate, up, counted) if save else ()


def _reference_backward(
    x: Tensor, weights: Weights, kept: tuple[Tensor, ...], activation: str, grad_y: Tensor, grad_l1: Tensor,
    dtype: torch.dtype, sums: GradientSums,
) -> Gradients:  # fmt: skip
    finite, gate, up, counted, *_ = kept
    saved = Saved(gate, up, counted, finite)
    rounded = _rounded(weights, x.dtype)
    return reference_backward.backward(x, rounded, saved, activation, grad_y, grad_l1, dtype, sums)


def _rounded(weights: Weights, dtype: torch.dtype) -> Weights:
    """Return the parameters in a dtype: a copy of masters that are wider."""
    return Weights(*(None if tensor is None else tensor.to(dtype) for tensor in weights))  # type: ignore[arg-type]


def _reference_kept(x: Tensor, weights: Weights, rows: Tensor | None, save: bool, capacity: int) -> tuple[Tensor, ...]:
    if not save:
        return ()
    n, d_ff = len(x), weights.gate.shape[0]
    up = x.new_empty(0, 0) if weights.up is None else x.new_empty(n, d_ff)
    return x.new_empty(n, d_ff), up, x.new_empty(n, dtype=wide(x.dtype))


def _hopper_kept(x: Tensor, weights: Weights, rows: Tensor | None, save: bool, capacity: int) -> tuple[Tensor, ...]:
    mask = () if rows is None or not save else (torch.empty_like(rows),)
    return *hopper_backward.kept(x, weights, save, capacity), *mask


BACKENDS: dict[str, Backend] = {
    "hopper": Backend(hopper_backward.forward, hopper_backward.backward, _hopper_kept),
    "reference": Backend(_reference_forward, _reference_backward, _reference_kept),
}


def _padded(x: Tensor, kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Fill the kept tensors up to KEPT with empty ones, as an op returns a fixed number."""
    return *kept, *(x.new_empty(0) for _ in range(KEPT - len(kept)))


@torch.library.custom_op("twell::ffn_forward", mutates_args=())
def ffn_forward(
    x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor, b_gate: Tensor | None, b_up: Tensor | None,
    b_down: Tensor | None, rows: Tensor | None, activation: str, backend: str, capacity: int, save: bool,
    sum_gate: Tensor | None = None, sum_up: Tensor | None = None, sum_down: Tensor | None = None,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """Run the forward pass of x [n, d_model]: y, l1, nnz, fires, finite, and KEPT tensors for the backward pass.

    capacity: values that are kept for each row, in the mean; of a backend that keeps non-zeros
    sum_gate, sum_up, sum_down: where the backward pass adds these weights' gradients, in place of returning them
    """
    weights = Weights(w_gate, w_up, w_down, b_gate, b_up, b_down)
    results, finite, kept = BACKENDS[backend].forward(x, weights, rows, activation, save, capacity)
    return results.y, results.l1, results.nnz, results.fires, finite, *_padded(x, kept)  # type: ignore[return-value]


@ffn_forward.register_fake
def _(  # type: ignore[no-untyped-def]
    x, w_gate, w_up, w_down, b_gate, b_up, b_down, rows, activation, backend, capacity, save, *sums
):
    n, d_ff = x.shape[0], w_gate.shape[0]
    kept = BACKENDS[backend].kept(x, Weights(w_gate, w_up, w_down, b_gate, b_up, b_down), rows, save, capacity)
    return (
        torch.empty_like(x),
        x.new_empty((), dtype=wide(x.dtype)),
        x.new_empty(n, dtype=torch.int32),
        x.new_empty(d_ff, dtype=torch.int64),
        x.new_empty(n, dtype=torch.bool),
        *_padded(x, kept),
    )


@torch.library.custom_op("twell::ffn_backward", mutates_args=())
def ffn_backward(
    grad_y: Tensor, grad_l1: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor,
    b_gate: Tensor | None, b_up: Tensor | None, b_down: Tensor | None, finite: Tensor, kept: list[Tensor],
    activation: str, backend: str,
) -> list[Tensor]:  # fmt: skip
    """Run the backward pass: gradients of `params.DIFFERENTIABLE`, those of absent arguments left out."""
    weights = Weights(w_gate, w_up, w_down, b_gate, b_up, b_down)
    saved = (finite, *kept)
    gradients = BACKENDS[backend].backward(x, weights, saved, activation, grad_y, grad_l1, w_gate.dtype, NO_SUMS)
    return [grad for grad in gradients if grad is not None]


@ffn_backward.register_fake
def _(grad_y, grad_l1, x, w_gate, w_up, w_down, b_gate, b_up, b_down, finite, kept, activation, backend):  # type: ignore[no-untyped-def]
    tensors = (x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    grads = [None if tensor is None else tensor.new_empty(tensor.shape) for tensor in tensors]
    if backend == "hopper" and not w_down.is_contiguous():  # as the weights lie
        grads[3] = w_down.new_empty(w_down.t().shape).t()
    return [grad for grad in grads if grad is not None]


@torch.library.custom_op("twell::ffn_backward_into", mutates_args=("sums",))
def ffn_backward_into(
    sums: list[Tensor], grad_y: Tensor, grad_l1: Tensor, x: Tensor, w_gate: Tensor, w_up: Tensor | None,
    w_down: Tensor, b_gate: Tensor | None, b_up: Tensor | None, b_down: Tensor | None, finite: Tensor,
    kept: list[Tensor], activation: str, backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the backward pass, and add the gradients of the weights to `sums`; return those of x and the biases.

    One that is absent is empty: torch.compile takes no lists from ops that write to their arguments.
    """
    weights = Weights(w_gate, w_up, w_down, b_gate, b_up, b_down)
    into = GradientSums(sums[0], sums[1] if w_up is not None else None, sums[-1])
    saved = (finite, *kept)
    gradients = BACKENDS[backend].backward(x, weights, saved, activation, grad_y, grad_l1, w_gate.dtype, into)
    return _none_empty(x, gradients.x, gradients.b_gate, gradients.b_up, gradients.b_down)


def _none_empty(x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put an empty tensor in place of each that is None."""
    return tuple(x.new_empty(0) if tensor is None else tensor for tensor in tensors)  # type: ignore[return-value]


@ffn_backward_into.register_fake
def _(sums, grad_y, grad_l1, x, w_gate, w_up, w_down, b_gate, b_up, b_down, finite, kept, activation, backend):  # type: ignore[no-untyped-def]
    return _none_empty(x, *(None if t is None else t.new_empty(t.shape) for t in (x, b_gate, b_up, b_down)))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: OpOutputs) -> None:
    """Keep what the backward op reads, and mark every output but y and l1 as one without a gradient."""
    ctx.activation, ctx.backend = inputs[8], inputs[9]
    ctx.present = [tensor is not None for tensor in inputs[:7]]
    # not among the saved tensors, of which torch demands that nothing writes to them
    ctx.sums = [tensor for tensor in inputs[12:] if tensor is not None]
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)  # else zeros are written for every output without one, kept values included
    tensors = [tensor for tensor in inputs[:7] if tensor is not None]
    ctx.save_for_backward(*tensors, *output[4:])


def _backward(ctx: Any, grad_y: Tensor | None, grad_l1: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    """Call the backward op with the gradients of y and l1; a missing one is zero."""
    if torch.is_grad_enabled():
        raise ValueError(NO_SECOND_PASS)
    number = sum(ctx.present)
    saved = ctx.saved_tensors  # read once, as activation checkpointing asks
    parameters, finite, kept = iter(saved[:number]), saved[number], list(saved[number + 1 :])
    inputs = [next(parameters) if present else None for present in ctx.present]
    x = saved[0]
    grad_y = torch.zeros_like(x) if grad_y is None else grad_y.contiguous()  # y.sum() gives an expanded one
    grad_l1 = x.new_zeros((), dtype=wide(x.dtype)) if grad_l1 is None else grad_l1
    arguments = (grad_y, grad_l1, *inputs, finite, kept, ctx.activation, ctx.backend)
    if ctx.sums:
        dx, *biases = ffn_backward_into(ctx.sums, *arguments)
        given = [grad if there else None for grad, there in zip(biases, ctx.present[4:], strict=True)]
        return dx, None, None, None, *given, *[None] * 8
    grads = iter(ffn_backward(*arguments))
    return *(next(grads) if present else None for present in ctx.present), *[None] * 8


ffn_forward.register_autograd(_backward, setup_context=_setup)
