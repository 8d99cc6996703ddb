"""The training passes on tensor cores of sm_90a: dense in the gate product, sparse in all others.

Forward: the launches of `hopper`, then one that keeps six bytes a non-zero: its place in its block, gate value and
hidden value. The up value is their quotient, which is as exact as one that was rounded itself. How many there are is
not known on the host, so there is room for `capacity` values a row. A call that has more keeps its x alone: the
backward pass begins with the launches of the forward one, which do nothing in other calls. `hopper_compact` does
otherwise: it keeps all of g and h instead, where there is room, or computes them again densely.

Backward, with the algebra of `reference_backward`, in seven launches more and no wait for the host:

1. Four small ones put neurons in order of how often they fire, cut that order into groups of 64, and list the tokens of
   each group by counting bits.
2. dh = dy Wd over each block's union of neurons, and from it du and dg, laid out by rows and by neurons.
3. dx = du Wu + dg Wg over the same unions.
4. The gradients of the weights: [du | dg] times the group's rows of x, and h times its rows of dy.
5. Those of biases, if there are any: sums of du and dg over each group's tokens, and of dy over rows.

Sums run in one order, in float32 registers, without atomics: same call, same bits. Work is shared out evenly among the
multiprocessors, since the busiest group has a hundred times the tokens of another.

Cost: products by the size of unions and lists, 3 to 30 % of dense. A layer keeps six bytes times `capacity` a row. The
workspace, which layers use one after the other, is for the worst case: 114 KB a row at d_ff 5632, touched where used;
`hopper_compact` has a smaller one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from twell.kernels import build
from twell.kernels.backends import gpu, hopper, hopper_compact
from twell.kernels.backends.hopper_compact import CTAS, Room, WorkspaceLayout
from twell.kernels.backends.hopper_libraries import ARCH
from twell.kernels.backends.reference_backward import ForwardResults, Gradients, GradientSums, Saved, Weights, delivered
from twell.kernels.build import Library, Source

BLOCK, PANEL = hopper.BLOCK, hopper.PANEL
KEEP_CTAS = 4  # that sum |h| over a block's rows
MOST_ITEMS = 1024  # blocks of rows, or groups of neurons
MOST_D_FF = 2**14  # counts of each neuron's firings lie in shared memory

_SOURCES = ("many_rows/gate", "many_rows/plan", "many_rows/up", "many_rows/down")
_TRAINING = ("keep", "dh", "products")
_RELU2 = ("many_rows/gate", "backward/dh")  # sources that know the activation, besides the bindings


@cache
def library(relu2: bool = False) -> Library:
    """Return the sources for an activation; those that do not know it are shared. relu2: ReLU squared"""
    flag = ("-DTWELL_RELU2",) if relu2 else ()
    sources = (*_SOURCES, *(f"backward/{name}" for name in _TRAINING))
    return Library(
        "hopper_relu2_training" if relu2 else "hopper_training",
        (
            *(
                Source(
                    f"hopper/{source}.cu",
                    (ARCH, "-DTWELL_T=__nv_bfloat16", "-DTWELL_TRAINING", *(flag if source in _RELU2 else ())),
                )
                for source in sources
            ),
            *(
                Source(f"hopper/backward/compact/{name}.cu", (ARCH, "-DTWELL_T=__nv_bfloat16", *flag))
                for name in ("sparse", "dense", "at_once")
            ),
            Source("hopper/backward/whole_calls/totals.cu", (ARCH,)),
            Source("hopper/backward/bindings.cpp", flag),
            Source("hopper/backward/whole_calls/bindings.cpp", flag),
        ),
        headers=("common/*", "hopper/**/*.cuh", "hopper/**/*.h"),
        seconds=15,
        cuda=True,
    )


def op_name(name: str, activation: str) -> str:
    """Return the name of a training op of an activation: that of its library and its own."""
    return f"hopper_{'relu2_' if activation == 'relu2' else ''}train_{name}"


def op(name: str, activation: str) -> Any:
    """Return a training op of an activation."""
    return getattr(torch.ops.twell, op_name(name, activation))


def refuses(
    device: torch.device,
    dtype: torch.dtype,
    d_model: int,
    d_ff: int,
    n: int,
    gated: bool,
    activation: str,
) -> str | None:
    """Return why these kernels cannot take such a call, or None; build them to find out, once a process."""
    if (reason := gpu.refuses(device, dtype, n)) is not None:
        return reason
    if dtype != torch.bfloat16:
        return "expected bfloat16, as an up value is the quotient of two kept ones, which float16 lacks the range for"
    blocks, panels = -(-n // BLOCK), -(-d_ff // PANEL)
    if d_ff > MOST_D_FF or blocks > MOST_ITEMS:
        return f"expected d_ff up to {MOST_D_FF} and up to {MOST_ITEMS * BLOCK} rows, got {d_ff} and {n}"
    if max(d_model * d_ff, n * d_model) >= 2**31 or panels * blocks * 24576 >= 2**32:
        return f"expected matrices whose offsets are 32 bits, got {n} rows, d_model {d_model} and d_ff {d_ff}"
    return _cannot_run(device, activation == "relu2")


@build.constant
def _cannot_run(device: torch.device, relu2: bool) -> str | None:
    """Return what the machine lacks, or why the build failed; None if the kernels run."""
    reason = gpu.not_hopper(device) or build.failure(library())  # which has the transpose
    return reason or (build.failure(library(True)) if relu2 else None)


@gpu.remembered
def regions(n: int, d_ff: int, may_repeat: bool) -> gpu.Regions:
    """Lay out the workspace of a backward pass of n rows, in the order in which the op takes its regions.

    may_repeat: whether it may have to repeat the forward pass, whose values come first
    """
    blocks, panels = -(-n // BLOCK), -(-d_ff // PANEL)
    values = n * d_ff if may_repeat else 0
    return gpu.Regions.laid_out(
        positions=(torch.int16, (values,)),
        gates=(torch.int16, (values,)),
        hidden=(torch.int16, (values,)),
        starts=(torch.int32, (blocks * (panels + 1) if may_repeat else 0,)),
        finite=(torch.bool, (n if may_repeat else 0,)),
        **hopper_compact.lists(n, d_ff, n * d_ff),
        panels_of_rows=(torch.bfloat16, (blocks, 2, panels, BLOCK, PANEL)),
        chunks=(torch.bfloat16, (panels, blocks * 2, 3, PANEL, PANEL)),
        parts=(torch.float32, (2, CTAS, 2, BLOCK, hopper.OUTPUTS)),
        arrived=(torch.int32, (2, CTAS)),
    )


def backward_layout(n: int, d_model: int, d_ff: int, kept: Room, adds: bool = False) -> WorkspaceLayout:
    """Lay out the workspace of a backward pass of a call that had so much room.

    adds: whether gradients of weights are added to what they are written to, which then holds nothing else
    sizes: offsets of a forward pass that it repeats, or none; or as a compact pass has them
    """
    if hopper_compact.ENABLED and hopper_compact.takes(n, d_ff):
        return hopper_compact.backward_layout(n, d_model, d_ff, kept, adds)
    whole, repeat = workspace_layout(n, d_ff, kept.values < n * d_ff)
    return WorkspaceLayout(whole.offsets, repeat, whole.nbytes)


@gpu.remembered
def workspace_layout(n: int, d_ff: int, may_repeat: bool) -> tuple[gpu.Regions, tuple[int, ...]]:
    """Return the regions of a backward pass, and the offsets of those of a forward pass that it repeats, or none.

    The latter lie where the backward pass has nothing yet, from `rank_of` on.
    """
    own = regions(n, d_ff, may_repeat)
    if not may_repeat:
        return own, ()
    again, begin = hopper.regions(n, d_ff, torch.bfloat16, True), own.offsets[list(own.specs).index("rank_of")]
    whole = replace(own, nbytes=max(own.nbytes, begin + again.nbytes))
    return whole, tuple(begin + offset for offset in again.offsets)


def kept(x: Tensor, weights: Weights, save: bool, capacity: int) -> tuple[Tensor, ...]:
    """Return unwritten tensors of what a forward pass keeps: values, unions, tables, [number of counted rows].

    capacity: values for each row, in the mean
    """
    if not save:
        return ()
    n, d_ff = len(x), weights.gate.shape[0]
    return _unwritten(x, d_ff, Room.of(n, d_ff, weights.up is not None, capacity))


def _unwritten(x: Tensor, d_ff: int, room: Room) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = len(x)
    blocks, panels = -(-n // BLOCK), -(-d_ff // PANEL)
    tables = blocks * (panels + 1) + blocks * BLOCK + blocks + d_ff + 1  # starts, order, union_sizes, fires, used
    return (
        x.new_empty(room.shape(n, d_ff), dtype=torch.int16),
        x.new_empty((blocks, panels * PANEL), dtype=torch.int16),
        x.new_empty(tables, dtype=torch.int32),
        x.new_empty(1, dtype=torch.float32),
    )


def forward(
    x: Tensor, weights: Weights, rows: Tensor | None, activation: str, save: bool, capacity: int
) -> tuple[ForwardResults, Tensor, tuple[Tensor, ...]]:
    """Run the forward pass; without `save` what it would keep is freed at once."""
    n, d_ff = len(x), weights.gate.shape[0]
    gate, up, down = _readable(x, weights)
    layout = hopper_compact.forward_layout(n, d_ff)
    workspace = x.new_empty(layout.nbytes, dtype=torch.uint8)
    room = Room.of(n, d_ff, up is not None, capacity if save else 1)
    values, unions, tables, counted = _unwritten(x, d_ff, room)
    y, finite = torch.empty_like(x), x.new_empty(n, dtype=torch.bool)
    nnz, l1_parts = x.new_empty(n, dtype=torch.int32), x.new_empty(KEEP_CTAS * len(unions), dtype=torch.float32)
    op("forward", activation)(
        x, gate, up, down, rows, workspace, layout.offsets,
        y, finite, nnz, values, unions, tables, l1_parts, room.values, room.whole_from, *_biases(x, weights),
    )  # fmt: skip
    counts = finite if rows is None else finite & (rows != 0)
    torch.sum(counts, 0, keepdim=True, dtype=torch.float32, out=counted).clamp_(min=1)
    l1 = (l1_parts.sum(0, keepdim=True) / counted).view(())
    fires = tables[-1 - d_ff : -1].long()
    results = ForwardResults(y, l1, nnz, fires, Saved(x, x, x, finite))
    if not save:
        return results, finite, ()
    mask = () if rows is None else (rows.clone(),)
    return results, finite, (values, unions, tables, counted, *mask)


def backward(
    x: Tensor, weights: Weights, kept: tuple[Tensor, ...], activation: str, grad_y: Tensor, grad_l1: Tensor,
    dtype: torch.dtype, into: GradientSums,
) -> Gradients:  # fmt: skip
    """Run the backward pass; the weights' gradients come in `dtype`, bfloat16 or float32, as the weights lie.

    into: where they are added instead
    """
    finite, values, unions, tables, counted, rows, *_ = kept
    n, d_ff = len(x), weights.gate.shape[0]
    added = _added_to(into)
    room = Room(values.shape[1]) if values.dim() == 2 else Room.whole(n, d_ff, len(values))
    layout = backward_layout(n, x.shape[1], d_ff, room, any(added))
    workspace = x.new_empty(layout.nbytes, dtype=torch.uint8)
    dx = torch.empty_like(x)
    like, (gate, up, down) = weights.gate.new_empty, into
    kind = dtype if gate is None else gate.dtype
    grads = [like(weights.gate.shape, dtype=kind) for _ in range(3 - sum(added))]
    if added[0]:
        grads = [gate, up, *grads]  # type: ignore[list-item]
    if added[2]:
        grads.append(down.t())  # type: ignore[union-attr]
    biases = [None if bias is None else like(bias.shape, dtype=grads[0].dtype) for bias in weights[3:]]
    op("backward", activation)(
        grad_y, x, *_readable(x, weights), finite, rows if rows.numel() else None,
        grad_l1.float() / counted, values, unions, tables, workspace, layout.offsets, layout.sizes,
        dx, *grads, added[0], added[2], *_biases(x, weights), *biases,
    )  # fmt: skip
    del workspace  # what comes next may lie there
    d_gate, d_up, d_down = (None if done else grad for done, grad in zip(added, grads, strict=True))
    if weights.up is None:
        d_up = None  # which has no meaning
    if d_down is not None:
        d_down = _laid_out_as(weights.down, d_down)
    totals = (d_gate, d_up, d_down)
    of_biases = (None if grad is None else grad.to(dtype) for grad in biases)
    return Gradients(dx, *(delivered(*pair, dtype) for pair in zip(totals, into, strict=True)), *of_biases)


def _added_to(into: GradientSums) -> tuple[bool, bool, bool]:
    """Return of the gradients of w_gate, w_up and w_down whether the kernels add them to `into`; else torch does.

    Both first ones or neither; sums of one dtype, those of the down weights by neuron.
    """
    gate, up, down = into
    if gate is None or up is None or down is None:
        return False, False, False
    fits = [total.dtype == gate.dtype and total.data_ptr() % 16 == 0 for total in into]  # type: ignore[union-attr]
    first = fits[0] and fits[1]
    return first, first, first and fits[2] and down.t().is_contiguous()


def _biases(x: Tensor, weights: Weights) -> tuple[Tensor | None, ...]:
    """Return the biases in the dtype of x."""
    return tuple(None if bias is None else bias.to(x.dtype) for bias in weights[3:])


def _readable(x: Tensor, weights: Weights) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the weights in the dtype of x, the down ones as the transpose of a matrix by neuron."""
    gate, up = weights.gate.to(x.dtype), None if weights.up is None else weights.up.to(x.dtype)
    if weights.down.t().is_contiguous():
        return gate, up, weights.down.to(x.dtype)
    by_neuron = x.new_empty(weights.gate.shape)
    torch.ops.twell.hopper_transpose(weights.down, by_neuron)
    return gate, up, by_neuron.t()


def _laid_out_as(weight: Tensor, by_neuron: Tensor) -> Tensor:
    """Return the gradient [d_model, d_ff] of down weights in their memory layout, as an optimizer wants it."""
    if weight.t().is_contiguous():
        return by_neuron.t()
    grad = by_neuron.new_empty(weight.shape)
    torch.ops.twell.hopper_transpose(by_neuron, grad)
    return grad
