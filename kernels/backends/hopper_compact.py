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

A call that would take more for six bytes a value than g and h take whole (four bytes times d_ff a row; two for h alone,
in a plain FFN) has room for those: `Room.matrices`. If the rows of its first launch fire more than WHOLE_FROM, they are
what is kept, and three products remain, as many as in dense autograd. Else values lie at the beginning of that room,
and the panels of a backward pass behind them, so that its arena is smaller. Nothing that was kept is written over, but
two backward passes of one call must not run at the same time.

Sums of tiles that several multiprocessors share lie where results or panels are not yet or no longer: those of dx in
the gradients of w_gate and w_up, those of weights where the panels were, or, of dense ones, in dx.

MiB at 16 384 rows of 2048 x 5632, at capacity 44 and 176 here, and in `hopper_backward` at 176: kept values 5, 17, 17;
a copy of them 0, 0, 528; their places 3, 11, 352; panels and chunks 156, 311, 880; sums 0, 0, 72; tokens 5.5 and ranks
1.4 in each. The forward workspace 222, 222, 427. Besides: y 64, dx 64, gradients 66, and 22 for a copy of w_down unless
it lies by neuron. By default 352 are kept whole (528 by dense autograd), with an arena of 373.
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
NOTHING = 8  # values a row, the least that `Room.of` gives, with which nothing is to be kept
SMALL = 128 * 2**20  # bytes that an arena may have to need one pass
ROOM = 2.0  # the share of the worst case that the arena has, by the root of the share of d_ff that is kept
SHARES = (128,)  # of d_ff, besides those of `training.CAPACITY_SHARES`: as an arena is larger than what is kept
# The share of d_ff that the first rows of a call fire in the mean, above which it is kept whole, if there is room. The
# sparse passes take 0.80 x as long as dense autograd at 330 of 5632, 0.95 to 1.04 x at 700, 1.19 x at 1 200.
WHOLE_FROM = 1 / 8
VALUES_SHARE = 6  # of d_ff: one neuron in so many has room where there is room for matrices, for calls that are not


@dataclass(frozen=True)
class Room:
    """What there is room to keep in a call.

    values: six bytes each; matrices: 2 with room for g and h, or in a plain FFN for h, of all rows and neurons, in the
    same memory; 0 without
    whole_from: firings of a row in the mean of the first rows, above which they are kept; -1 without such room
    """

    values: int
    matrices: int = 0
    whole_from: int = -1

    @classmethod
    def of(cls, n: int, d_ff: int, gated: bool, capacity: int) -> Room:
        """Return that of n rows, told to have room for `capacity` values a row in the mean."""
        each, matrices = min(d_ff, _eights(capacity)), 2 if gated else 1
        if 3 * each >= matrices * d_ff and keeps_whole(n, d_ff):
            return cls.whole(n, d_ff, matrices)
        return cls(n * each)

    @classmethod
    def whole(cls, n: int, d_ff: int, matrices: int) -> Room:
        """Return room for so many matrices. Values take no more than the first third of two, or all of one."""
        each = min(_eights(-(-d_ff // VALUES_SHARE)), d_ff // 3 // 8 * 8)
        return cls(n * each, matrices, min(int(WHOLE_FROM * d_ff), each))

    def shape(self, n: int, d_ff: int) -> tuple[int, ...]:
        """Return that of the tensor of 16-bit numbers."""
        return (self.matrices, n, d_ff) if self.matrices else (3, self.values)


def whole_capacity(d_ff: int) -> int:
    """Return the least capacity that has room for g and h."""
    return -(-2 * d_ff // 3)


def keeps_whole(n: int, d_ff: int) -> bool:
    """Return whether calls of n rows keep g and h, if they are told to have so much room."""
    return ENABLED and AT_ONCE and takes(n, d_ff)


def _eights(many: int) -> int:
    return -(-many // 8) * 8


@dataclass(frozen=True)
class WorkspaceLayout:
    """Where an op finds the regions of its workspace, and what else it is told, all as the op takes it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int


def forward_layout(n: int, d_ff: int) -> WorkspaceLayout:
    """Lay out the workspace of a forward pass; with fewer rows than n at a time, their number follows the offsets.

    A backward pass that is not compact repeats the forward pass over all rows at once. The order of rows and the unions
    depend on how many there are, so the forward pass then takes all at once too.
    """
    rows = FORWARD_ROWS if ENABLED and takes(n, d_ff) else n
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


def backward_layout(n: int, d_model: int, d_ff: int, kept: Room, adds: bool = False) -> WorkspaceLayout:
    """Lay out a backward pass of a call that had so much room.

    sizes: of the arena in bytes; groups of neurons, and blocks of rows, of a dense pass; whether sums of dx lie in
    gradients of weights, and those of dense gradients of weights in dx; whether a dense pass may be one at once; the
    byte of what is kept from which on panels lie there, or 0 if they lie in the arena; the room for values
    adds: whether gradients of weights are added to what they are written to, so that nothing else may lie there
    """
    share = min(kept.values / (n * d_ff), WHOLE_FROM if kept.matrices else 1)
    return _layout(n, d_model, d_ff, kept, adds, AT_ONCE, ROOM * math.sqrt(share), PASSES, SMALL)


@gpu.remembered
def _layout(
    n: int, d_model: int, d_ff: int, kept: Room, adds: bool, at_once: bool, share: float, passes: int, small: int
) -> WorkspaceLayout:
    blocks, panels = -(-n // BLOCK), -(-d_ff // PANEL)
    of_block, of_group = 2 * panels * BLOCK * PANEL * 2, 2 * blocks * 3 * PANEL * PANEL * 2  # bytes
    side = CTAS * BLOCK * OUTPUTS * 4  # of sums of dx, of which there are two; those of weights are half as many again
    in_gradients, in_dx = not adds and d_ff * d_model * 2 >= side, n * d_model * 2 >= 3 * side
    before_groups, before_blocks = 0 if in_dx else 3 * side, 2 * side
    values, matrix = kept.values, n * d_ff * 2
    share = min(1.0, share)
    of_panels, of_chunks = max(math.ceil(share * blocks * of_block), 3 * side), math.ceil(share * panels * of_group)
    behind = _aligned(6 * values)
    apart = at_once and kept.matrices * matrix - behind >= of_panels
    arena = max(
        of_chunks + (0 if apart else of_panels),
        before_groups + _even(-(-panels // passes), panels) * of_group,
        before_blocks + -(-blocks // passes) * of_block,
        min(small, max(before_groups + panels * of_group, before_blocks + blocks * of_block)),
    )
    matrices = (2 if kept.matrices else 3) * matrix  # bytes of du, dg and h, which then lies in what is kept
    if at_once and (kept.matrices or values <= NOTHING * n):
        arena = max(arena, matrices)
    arena = _aligned(arena)
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
    sizes = (arena, groups, rows, int(in_gradients), int(in_dx), int(at_once), behind if apart else 0, values)
    return WorkspaceLayout(regions.offsets, sizes, regions.nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // gpu.ALIGNED) * gpu.ALIGNED


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
