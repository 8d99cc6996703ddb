"""Training calls of the hopper kernels as one op forward and one backward, checked once for each way of calling.

The ops of `autograd.py` can be traced. Outside torch.compile that costs a call more of the host's time than the GPU
needs for its launches: each passes through several layers of Python, and a dozen small ops make results, a workspace
and sums. Here autograd calls a C++ op in each direction that does all of it. The launches are the same, and so are the
bits of all results but l1, whose last one depends on the order of a sum.

A call is looked up by all that its checks look at; one that was seen before runs at once. ENABLED turns that off, as
tests do that compare the two ways.

Cost: two ops of the host, and its launches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from twell.kernels.autograd import NO_SECOND_PASS
from twell.kernels.backends import hopper_backward, hopper_compact
from twell.kernels.backends.hopper_compact import Room

ENABLED = True
MOST_REMEMBERED = 256  # ways of calling that are remembered
Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # y, l1, nnz, fires, finite
Key = tuple[Any, ...]


@dataclass(frozen=True)
class OpArguments:
    """The arguments of the two ops beside tensors.

    room: of what is kept; forward_*, offsets, repeat and nbytes: of the workspaces, see `hopper_backward`
    """

    activation: str
    room: Room
    forward_offsets: tuple[int, ...]
    forward_nbytes: int
    offsets: tuple[int, ...]
    repeat: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, n: int, d_model: int, d_ff: int, gated: bool, capacity: int, activation: str) -> OpArguments:
        """Return the arguments of calls of n rows that keep `capacity` values a row in the mean."""
        room = Room.of(n, d_ff, gated, capacity)
        ahead = hopper_compact.forward_layout(n, d_ff)
        back = hopper_backward.backward_layout(n, d_model, d_ff, room)
        return cls(activation, room, ahead.offsets, ahead.nbytes, back.offsets, back.sizes, back.nbytes)


_remembered: dict[Key, OpArguments] = {}


def key_of(x: Tensor, weights: tuple[Tensor | None, ...], rows: Tensor | None, *options: object) -> Key | None:
    """Return all that the checks of a call look at; None for a call that these ops do not take.

    options: the other arguments of the call
    """
    if not ENABLED or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return None
    tensors: list[Key | None] = []
    for tensor in (x, *weights, rows):
        if tensor is None:
            tensors.append(None)
        elif type(tensor) is Tensor or type(tensor) is Parameter:
            about = tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad
            tensors.append(about)
        else:  # of a kind that may not be what it seems, or no tensor
            return None
    return torch.is_grad_enabled(), hopper_compact.ENABLED, hopper_compact.AT_ONCE, *options, *tensors


def run_again(key: Key | None, x: Tensor, weights: tuple[Tensor | None, ...], rows: Tensor | None) -> Results | None:
    """Run a call whose like was checked before; None if none was."""
    arguments = _remembered.get(key) if key is not None else None
    return None if arguments is None else _run(arguments, x, weights, rows)


def run_first(
    key: Key, x: Tensor, weights: tuple[Tensor | None, ...], rows: Tensor | None, capacity: int, activation: str
) -> Results:
    """Run a call that was checked and is taken by `hopper`, with gradients to follow; remember that it was checked."""
    if len(_remembered) >= MOST_REMEMBERED:
        _remembered.clear()
    d_ff, d_model = weights[0].shape  # type: ignore[union-attr]
    gated = weights[1] is not None
    _remembered[key] = OpArguments.of(x.numel() // d_model, d_model, d_ff, gated, capacity, activation)
    return _run(_remembered[key], x, weights, rows)


def _run(arguments: OpArguments, x: Tensor, weights: tuple[Tensor | None, ...], rows: Tensor | None) -> Results:
    return _WholeCall.apply(x, *weights[:3], rows, arguments)  # type: ignore[no-any-return, no-untyped-call]


def _readable(x: Tensor, w_gate: Tensor, w_up: Tensor | None, w_down: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return masters in the dtype of x; the down ones only if they lie by neuron: others are rounded when turned."""
    if w_gate.dtype is x.dtype:
        return w_gate, w_up, w_down
    up = None if w_up is None else w_up.to(x.dtype)
    return w_gate.to(x.dtype), up, w_down.to(x.dtype) if w_down.stride(0) == 1 else w_down


class _WholeCall(torch.autograd.Function):
    """Both passes. Results that have no gradient are marked; what the backward pass reads is autograd's."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        w_gate: Tensor,
        w_up: Tensor | None,
        w_down: Tensor,
        rows: Tensor | None,
        arguments: OpArguments,
    ) -> Results:
        y, l1, nnz, fires, finite, values, unions, tables, counted_rows = hopper_backward.op(
            "call", arguments.activation
        ).default(
            x,
            *_readable(x, w_gate, w_up, w_down),
            rows,
            arguments.room.values,
            arguments.room.whole_from,
            arguments.forward_offsets,
            arguments.forward_nbytes,
        )
        ctx.arguments = arguments
        ctx.mark_non_differentiable(nnz, fires, finite)
        ctx.set_materialize_grads(False)
        mask = None if rows is None else rows.clone()  # which a caller may write to
        ctx.save_for_backward(x, w_gate, w_up, w_down, finite, mask, values, unions, tables, counted_rows)
        return y, l1, nnz, fires, finite

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ValueError(NO_SECOND_PASS)
        arguments: OpArguments = ctx.arguments
        x, w_gate, w_up, w_down, *kept = ctx.saved_tensors  # read once, as activation checkpointing asks
        grad_y = torch.zeros_like(x) if grads[0] is None else grads[0].contiguous()  # y.sum() gives an expanded one
        dx, gate, up, down = hopper_backward.op("call_backward", arguments.activation).default(
            grad_y, grads[1], x, *_readable(x, w_gate, w_up, w_down), *kept,
            arguments.offsets, arguments.repeat, arguments.nbytes, w_gate.dtype is torch.float32,
        )  # fmt: skip
        up = None if w_up is None else up
        return dx, gate, up, down.t() if w_down.stride(0) == 1 else down, None, None
