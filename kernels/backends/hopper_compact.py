"""Workspaces of the Hopper training passes that are sized by what a call keeps, not by the worst case.

    hopper_compact.ENABLED = False  # back to the worst case's: up to 8 % faster, five times the memory

Forward: the launches of `hopper` for FORWARD_ROWS rows after as many, through one workspace.

Backward: panels of du and dg, and chunks of du, dg and h, lie without gaps in one arena, as only the device knows their
sizes. The arena's follows `capacity`, the neurons a row for which values are kept. A call that does not fit is not
repeated value by value: other launches, which return at once in every call that fits, compute it densely from x and dy.
They go over groups of neurons for the weights' gradients and over blocks of rows for dx, PASSES of each at most, in the
same arena. Each gradient is one sum in float32, whichever way it is made; same call, same bits.
With AT_ONCE, and an arena that has room for du, dg and h of all neurons and rows, five products do it instead, unless
a row is not finite. The arena has that room from an eighth of d_ff on, and where next to nothing is to be kept.

Sums of tiles that several multiprocessors share lie where results or panels are not yet or no longer: those of dx in
the gradients of w_gate and w_up, those of weights where the panels were, or, of dense ones, in dx.

MiB at 16 384 rows of 2048 x 5632, at capacity 44 and 176 here, and in `hopper_backward` at 176: kept values 5, 17, 17;
a copy of them 0, 0, 528; their places 3, 11, 352; panels and chunks 156, 311, 880; sums 0, 0, 72; tokens 5.5 and ranks
1.4 in each. The forward workspace 222, 222, 427. Besides: y 64, dx 64, gradients 66, and 22 for a copy of w_down unless
it lies by neuron.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from twell.kernels.backends import gpu, hopper
from twell.kernels.backends.hopper import BLOCK, OUTPUTS, PANEL

ENABLED = True
AT_ONCE = True  # whether what does not fit is computed at once where the arena has room
CTAS = 144  # among which a product's work is shared out, at most
FORWARD_ROWS = 8192  # a multiple of hopper.WINDOW
PASSES = 8  # most of each kind
NOTHING = 8  # values a row, the least that `hopper_backward.room` gives, with which nothing is to be kept
SMALL = 128 * 2**20  # bytes that an arena may have to need one pass
ROOM = 2.0  # the share of the worst case that the arena has, by the root of the share of d_ff that is kept
SHARES = (128,)  # of d_ff, besides those of `training.CAPACITY_SHARES`: as an arena is larger than what is kept


@dataclass(frozen=True)
class WorkspaceLayout:
    """Where an op finds the regions of its workspace, and what else it is told, all as the op takes it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int


def forward_layout(n: int, d_ff: int) -> WorkspaceLayout:
    """Lay out the workspace of a forward pass; with fewer rows than n at a time, their number follows the offsets."""
    rows = FORWARD_ROWS if ENABLED else n
    regions = hopper.regions(min(n, rows), d_ff, torch.bfloat16, True)
    return WorkspaceLayout(regions.offsets + ((rows,) if n > rows else ()), (), regions.nbytes)


def lists(n: int, d_ff: int, values: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return the regions of a backward pass that say which tokens a group of neurons has, and where its values lie.

    values: how many there may be
    """
    blocks, panels = -(-n // BLOCK), -(-d_ff // PANEL)
    return {
        "rank_of": (torch.int16, (d_ff,)),
        "neuron_at": (torch.int16, (d_ff,)),
        "union_ranks": (torch.int16, (blocks, panels * PANEL)),
        "marks": (torch.int32, (panels, blocks * 4)),
        "before": (torch.int32, (panels, blocks * 4)),
        "tokens": (torch.int32, (panels, blocks * BLOCK)),
        "token_counts": (torch.int32, (panels,)),
        "places": (torch.int32, (values,)),
        "tasks": (torch.int32, (blocks * panels, 2)),
        "task_count": (torch.int32, (1,)),
    }


def takes(n: int, d_ff: int) -> bool:
    """Return whether the arena's values have numbers of 32 bits, even if there are as many as there can be."""
    blocks, panels = -(-n // BLOCK), -(-d_ff // PANEL)
    return (blocks * panels * (4 * BLOCK + 12 * PANEL) * PANEL + 3 * CTAS * BLOCK * OUTPUTS * 4) // 2 < 2**32


def backward_layout(n: int, d_model: int, d_ff: int, values: int, adds: bool = False) -> WorkspaceLayout:
    """Lay out a backward pass of a call that keeps up to `values` values.

    sizes: of the arena in bytes; groups of neurons, and blocks of rows, of a dense pass; whether sums of dx lie in
    gradients of weights, and those of dense gradients of weights in dx; whether a dense pass may be one at once
    adds: whether gradients of weights are added to what they are written to, so that nothing else may lie there
    """
    return _layout(n, d_model, d_ff, values, adds, AT_ONCE, ROOM, PASSES, SMALL)


@gpu.remembered
def _layout(
    n: int, d_model: int, d_ff: int, values: int, adds: bool, at_once: bool, room: float, passes: int, small: int
) -> WorkspaceLayout:
    blocks, panels = -(-n // BLOCK), -(-d_ff // PANEL)
    of_block, of_group = 2 * panels * BLOCK * PANEL * 2, 2 * blocks * 3 * PANEL * PANEL * 2  # bytes
    side = CTAS * BLOCK * OUTPUTS * 4  # of sums of dx, of which there are two; those of weights are half as many again
    in_gradients, in_dx = not adds and d_ff * d_model * 2 >= side, n * d_model * 2 >= 3 * side
    before_groups, before_blocks = 0 if in_dx else 3 * side, 2 * side
    share = min(1.0, room * math.sqrt(values / (n * d_ff)))
    arena = max(
        max(math.ceil(share * blocks * of_block), 3 * side) + math.ceil(share * panels * of_group),
        before_groups + _even(-(-panels // passes), panels) * of_group,
        before_blocks + -(-blocks // passes) * of_block,
        min(small, max(before_groups + panels * of_group, before_blocks + blocks * of_block)),
    )
    matrices = 3 * n * d_ff * 2  # bytes of du, dg and h
    if at_once and values <= NOTHING * n:
        arena = max(arena, matrices)
    arena = -(-arena // gpu.ALIGNED) * gpu.ALIGNED
    groups = _each(panels, (arena - before_groups) // of_group, even=True)
    rows = _each(blocks, (arena - before_blocks) // of_block, even=False)
    regions = gpu.Regions.laid_out(
        **lists(n, d_ff, values),
        panel_starts=(torch.int32, (blocks + 1,)),
        chunk_starts=(torch.int32, (panels,)),
        fits=(torch.int32, (1,)),
        sums=(torch.uint8, (0 if in_gradients else 2 * side,)),
        arrived=(torch.int32, (2, CTAS)),
        arena=(torch.uint8, (arena,)),
    )
    at_once = at_once and arena >= matrices
    sizes = (arena, groups, rows, int(in_gradients), int(in_dx), int(at_once))
    return WorkspaceLayout(regions.offsets, sizes, regions.nbytes)


def _even(number: int, most: int) -> int:
    """Return the next even number, as a tile has two groups, or `most` where that is less."""
    return min(number + number % 2, most)


def _each(total: int, fit: int, even: bool) -> int:
    """Return how many of `total` each pass takes if `fit` fit: as few passes as can be, of about the same size."""
    if fit >= total:
        return total
    fit -= fit % 2 if even and fit > 1 else 0
    each = -(-total // -(-total // fit))
    return _even(each, fit) if even else each
