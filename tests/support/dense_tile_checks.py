"""What lies whole after the Hopper kernel's gate product, and calls that check it, for tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from support.gpu_checks import CUDA, assert_same
from torch import Tensor

from twell.kernels.backends import hopper, reference
from twell.kernels.backends.gpu import Stage, results
from twell.kernels.params import FFNParams
from twell.kernels.stats import Stats

PAIR, TILE = 2 * hopper.BLOCK, hopper.LAYOUT.tile
LOUD_TILE, QUIET_TILE = 11, 4  # 128ths of a tile's neurons that its rows fire in the mean
QUIET = 2**16  # what a quiet row counts besides
TAKEN, LEFT = 2**30, 2**29  # of a tile whose up product nobody else can take; it is left to `up`


def run(params: FFNParams, *stages: int) -> tuple[Tensor, Stats, hopper.HopperWorkspace]:
    """Return y, stats and the workspace as it is left; in stages, the gate's kernel makes no up products."""
    n, d_ff = params.x.shape[0], params.w_gate.shape[0]
    (y, stats), workspace = results(params), hopper.HopperWorkspace(n, d_ff, params.x.dtype, CUDA)
    for some in stages or (hopper.ALL_STAGES,):
        hopper.launch(params, slice(0, n), workspace, y, stats, some)
    return y, stats, workspace


def counters(workspace: hopper.HopperWorkspace, n: int) -> Tensor:
    """Return how many rows lie whole in each pair of blocks [n / 256] and tile [tiles], QUIET ones, TAKEN and LEFT."""
    pairs, tiles, behind = -(-n // PAIR), workspace.tensor("heads").shape[1], n + 1 + 3 * -(-n // hopper.WINDOW)
    return workspace.tensor("row_sums")[behind : behind + pairs * tiles].view(pairs, tiles)


def taken_tiles(workspace: hopper.HopperWorkspace, n: int) -> Tensor:
    """Return of which of them the gate's kernel has taken the up product."""
    words = counters(workspace, n)
    return (words & TAKEN > 0) & (words & LEFT == 0)


def whole_rows(params: FFNParams) -> Tensor:
    """Return the counters' expected values: rows of tiles of which a block fires nearly all, or most and much, or most
    and little; quiet rows fire less than a quarter of its mean, or nothing if that is less than two."""
    gate = params.x.float() @ params.w_gate.float().t()
    fired = (gate if params.b_gate is None else gate + params.b_gate.float()) > 0
    n, d_ff = fired.shape
    padded = torch.nn.functional.pad(fired, (0, -d_ff % TILE, 0, -n % PAIR))
    of_tiles = padded.view(-1, 2, hopper.BLOCK, padded.shape[1] // TILE, TILE)  # pair, its block, row, tile, neuron
    columns = (d_ff - TILE * torch.arange(of_tiles.shape[3], device=CUDA)).clamp(max=TILE)
    rows = (n - hopper.BLOCK * torch.arange(2 * len(of_tiles), device=CUDA)).clamp(0, hopper.BLOCK).view(-1, 2, 1)
    of_rows = of_tiles.sum(4)
    values, there = of_rows.sum(2, keepdim=True), torch.arange(hopper.BLOCK, device=CUDA)[:, None] < rows[:, :, None]
    loud, quiet = (128 * values.squeeze(2) >= share * rows * columns for share in (LOUD_TILE, QUIET_TILE))
    united = of_tiles.any(2).sum(3)
    whole = (20 * united >= 17 * columns) | loud & (5 * united >= 3 * columns) | ~quiet & (50 * united >= 33 * columns)
    few = torch.where(values < 8 * rows[:, :, None], of_rows == 0, 4 * of_rows * rows[:, :, None] < values)
    counted = there + QUIET * (there & few)
    return (counted.sum(2) * whole).sum(1)


def check_whole(params: FFNParams) -> Tensor:
    """Check what the gate's kernel alone counts of each pair and tile."""
    counted = counters(run(params, Stage.GATE)[2], params.x.shape[0])
    assert_same("what lies whole", counted, whole_rows(params).int())
    return counted


def check(params: FFNParams) -> tuple[Tensor, hopper.HopperWorkspace]:
    """Compare everything with the reference, whoever makes the up products; return which tiles are taken."""
    n = params.x.shape[0]
    y, stats, workspace = run(params)
    expected, counted = reference.run(params)
    assert_same("y", y, expected)
    assert_same("stats", replace(stats, packed=None), replace(counted, packed=None))
    assert_same("packed", workspace.packed(params.w_gate.shape[0], stats.finite), counted.packed)
    assert_same("y of both kernels", hopper.run(params)[0], y)
    apart = run(params, Stage.GATE, hopper.ALL_STAGES - Stage.GATE)
    assert not bool(taken_tiles(apart[2], n).any())
    assert_same("y by stages", apart[0], y)
    assert_same("nnz by stages", apart[1].nnz, stats.nnz)
    assert_same("finite by stages", apart[1].finite, stats.finite)
    assert_same("order by stages", apart[2].tensor("order")[:n], workspace.tensor("order")[:n])
    whole, taken = counters(workspace, n) % LEFT, taken_tiles(workspace, n)
    rows = torch.full_like(whole, PAIR)
    rows[-1] = n % PAIR or PAIR
    assert_same("rows that lie whole", whole, counters(apart[2], n) % LEFT)
    assert_same("of what is taken", torch.where(taken, whole % QUIET, rows), rows)
    assert int((whole // QUIET * taken).max()) <= PAIR // 8
    return taken, workspace


def panels_left(taken: Tensor, n: int, d_ff: int) -> int:
    """Return the panels of all blocks that are left to `up`, where every block runs dense in place."""
    panels = torch.arange(-(-d_ff // hopper.PANEL), device=CUDA) * hopper.PANEL // TILE
    return int((~taken.repeat_interleave(2, 0)[: -(-n // hopper.BLOCK), panels]).sum())


def blocks_in_place(workspace: hopper.HopperWorkspace, n: int) -> list[bool]:
    place = torch.arange(n, device=CUDA, dtype=torch.int32)
    orders, places = workspace.tensor("order")[:n].split(hopper.WINDOW), place.split(hopper.WINDOW)
    return [torch.equal(order, row) for order, row in zip(orders, places, strict=True)]
