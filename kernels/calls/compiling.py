"""A backend of torch.compile that lets an FFN's kernel add the residual.

A decoder layer adds its input to its FFN's output. torch.compile cannot look into the FFN's op, so that addition would
be a launch of its own: 3 % of a step of decoding. The kernels can add as they write. So this is inductor, after one
change of what was traced: an addition that comes right after an FFN's op, and that alone reads its output, becomes an
argument of the op. The sum's terms are rounded as in eager mode, so its bits are those of eager mode.

    torch.compile(model, backend="twell")  # where this package is installed; elsewhere backend=compiling.twell

Cost: none. Additions that the kernels do not take stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor
from torch import Tensor, fx


def twell(
    graph: fx.GraphModule, inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a traced graph. mode, options: as torch.compile takes them."""
    add_in_kernels(graph)
    chosen = {} if mode is None else torch._inductor.list_mode_options(mode)
    compiled: Callable[..., Any] = torch._inductor.compile(graph, list(inputs), {**chosen, **(options or {})})
    return compiled


def add_in_kernels(traced: fx.GraphModule) -> int:
    """Move additions into the FFN ops before them, in place; return how many were moved.

    An op takes one if its schema has an argument `added`.
    """
    moved = 0
    for call in list(traced.graph.nodes):
        places = _places(call)
        if "added" not in places or call.args[places["added"]] is not None:
            continue
        y, addition = call.args[places["y"]], call.next
        if set(y.users) != {call, addition} or not _is_addition(addition):
            continue
        (other,) = [term for term in addition.args if term is not y] or [y]
        if not _can_be_added(other, y):
            continue
        call.update_arg(places["added"], other)
        addition.replace_all_uses_with(y)
        traced.graph.erase_node(addition)
        moved += 1
    if moved:
        traced.recompile()
    return moved


def _places(node: fx.Node) -> dict[str, int]:
    """Return the positions of an op's arguments by name; nothing of other nodes."""
    op = node.target
    if isinstance(op, torch._ops.OpOverloadPacket) and op.overloads() == ["default"]:
        op = op.default
    if node.op != "call_function" or not isinstance(op, torch._ops.OpOverload):
        return {}
    return {argument.name: place for place, argument in enumerate(op._schema.arguments)}


def _is_addition(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and node.target in (operator.add, torch.add)
        and len(node.args) == 2
        and not node.kwargs
    )


def _can_be_added(other: Any, y: fx.Node) -> bool:
    """Return whether a kernel can add a value to y: a tensor like it, and none that a gradient is followed through."""
    if not isinstance(other, fx.Node) or other is y:
        return False
    term, to = other.meta.get("example_value"), y.meta.get("example_value")
    if not isinstance(term, Tensor) or not isinstance(to, Tensor):
        return False
    alike = term.shape == to.shape and term.dtype == to.dtype and term.device == to.device
    return alike and term.is_contiguous() and not term.requires_grad
