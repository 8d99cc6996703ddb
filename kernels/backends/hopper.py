"""The `hopper` kernel: the FFN op on tensor cores of sm_90a, dense in the gate and over each block's union afterwards.

Five launches, which overlap, and no wait for the host. One zeroes what the gate product adds to, whose epilogue emits
TwELL. A plan puts rows in order of nnz within windows of 1024, where that pays, so that the few that fire many neurons
share blocks; it lists, for every 128 rows in that order, the union of the neurons they fire, and lays the gate values
out over it. Up and down are products over the union, whose weight rows are gathered once a block; where the union is
nearly everything they read whole weight tiles instead. Of up to 64 blocks such tiles need no plan: the gate's kernel
goes on with their up products, as it comes to have them. Of up to 256 blocks the down product's work is shared out
evenly: what one multiprocessor begins another may go on with. Further launches count what is asked for besides nnz.
Sums have one order, set by shapes and inputs: same parameters, same bits.

Small calls take two launches, which overlap, and no plan: gate and up together by tiles of 128 rows and up to 256
neurons, or of 256 and 176, down over what the tiles of a block's rows have fired; up to 64 rows are one block. Small is
what has few tiles in the gate product: up to 2 048 rows at d_ff 5632.

Cost: the gate product in full, up and down by the size of the unions (a block's union is about 15 times a row's nnz in
text). Workspace is worst case, one allocation of torch's, touched only where it is used: 26 KB a row at d_ff 5632.

    y, stats = gated_ffn(x, w_gate, w_up, w_down, kernel="hopper")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from twell.kernels import build
from twell.kernels.backends import gpu
from twell.kernels.backends.gpu import Stage
from twell.kernels.backends.hopper_libraries import library, loaded_op
from twell.kernels.layout import Layout, TwELL, number_spilled, pack, tile_view, unpack
from twell.kernels.params import NO_REQUIREMENTS, FFNParams, Requirements, not_sparse
from twell.kernels.stats import RunAgain, Stats

LAYOUT = Layout(tile=256, compression=8)  # what the gate product emits
BLOCK, PANEL = 128, 64  # rows that share a union; columns of a hidden panel
OUTPUTS = 256  # columns of y that the down product makes at once
WINDOW = 1024  # rows that are put in order of nnz before they are cut into blocks
HEAD = 8  # words of a tile that lie apart from the others, as most tiles need no more
FEW_TILES = 352  # of the gate product: up to so many, a call has no order, no plan and, unless asked for, no words
PLAIN_NEURONS = 16_384  # of a plain FFN, up to which calls have a plan only if they need words
PARTIAL_SUMS = 144  # of a tile of y, that can be left for other CTAs at once: as many as a GH100 has multiprocessors
ALL_STAGES = int(Stage.GATE | Stage.PLAN | Stage.UP | Stage.DOWN | Stage.COUNTS)
NO_WORDS = int(Stage.PLAN | Stage.COUNTS)  # needless without a plan where nnz alone is required


def refuses(
    device: torch.device,
    dtype: torch.dtype,
    d_model: int,
    d_ff: int,
    n: int,
    requirements: Requirements | FFNParams = NO_REQUIREMENTS,
) -> str | None:
    """Return why this kernel cannot take a call of n rows, or None. Compile it for the call's activation to find out,
    once a process."""
    if (reason := gpu.refuses(device, dtype, n)) is not None:
        return reason
    if d_ff > 2**16 - 8:
        return f"expected d_ff up to {2**16 - 8}, as a union holds 16-bit numbers, got {d_ff}"
    if d_model * d_ff >= 2**31:
        return f"expected weights of less than 2^31 values, as offsets are 32 bits of bytes, got {d_ff} x {d_model}"
    return _cannot_run(device, requirements.activation == "relu2", requirements.up_relu)


@build.constant
def _cannot_run(device: torch.device, relu2: bool, up_relu: bool) -> str | None:
    """Return what the machine lacks, or why the build failed; None if the kernel runs."""
    return gpu.not_hopper(device) or build.failure(library(relu2, up_relu))


def lacks(requirements: Requirements | FFNParams) -> str | None:
    """Return the options of a call that this kernel does not have; None if it has all."""
    if (reason := not_sparse(requirements)) is not None:
        return reason
    layout = requirements.layout
    if layout is None or layout == LAYOUT or (layout.tile == LAYOUT.tile and not requirements.want_packed):
        return None
    return f"expected tiles of {LAYOUT.tile} at compression {LAYOUT.compression}, got {layout}"


def has_plan(n: int, d_ff: int) -> bool:
    """Return whether a pass of n rows has an order and a plan: small ones gain less than these cost."""
    return -(-n // BLOCK) * LAYOUT.tiles(d_ff) > FEW_TILES


def plans(params: FFNParams, n: int) -> bool:
    """Return whether a pass of n rows of a call has an order and a plan."""
    d_ff = len(params.w_gate)
    return has_plan(n, d_ff) and (params.gated or needs_words(params) or d_ff > PLAIN_NEURONS)


def needs_words(params: FFNParams) -> bool:
    """Return whether a call's results come from TwELL: all but y and nnz do."""
    return params.want_packed or params.probes == "neurons" or (params.layout is not None and params.probes != "none")


@gpu.remembered
def regions(n: int, d_ff: int, dtype: torch.dtype, plan: bool) -> gpu.Regions:
    """Return the regions of the workspace of n rows: first those of the gate, then of the plan, then of `down`."""
    tiles, panels, blocks = LAYOUT.tiles(d_ff), -(-d_ff // PANEL), -(-n // BLOCK)
    dense_tiles = 3 * -(-n // WINDOW) + 2 * -(-blocks // 2) * tiles  # words that say which tiles lie dense in `spill`
    partial = PARTIAL_SUMS if plan else 0
    return gpu.Regions.laid_out(
        heads=(torch.int32, (n, tiles, HEAD)),
        tails=(torch.int32, (n, tiles, LAYOUT.words - HEAD)),
        masks=(torch.int32, (n, tiles, LAYOUT.tile // 32)),
        spill=(dtype, (n, tiles, LAYOUT.tile)),
        fired=(torch.int32, (blocks, tiles, LAYOUT.tile // 32)),
        row_sums=(torch.int32, (n + 1 + dense_tiles,)),
        order=(torch.int32, (-(-n // WINDOW) * WINDOW,)),
        unions=(torch.int16, (blocks, panels * PANEL)),
        union_sizes=(torch.int32, (blocks,)),
        hidden=(dtype, (blocks, panels, BLOCK, PANEL)),
        tasks=(torch.int32, (blocks * panels, 2)),
        partial_sums=(torch.float32, (partial, BLOCK, OUTPUTS)),
        partial_ready=(torch.int32, (partial, 8)),  # by warps
    )


class HopperWorkspace(gpu.Workspace):
    """The workspace of one pass of n rows."""

    def __init__(
        self, n: int, d_ff: int, dtype: torch.dtype, device: torch.device, planned: bool | None = None
    ) -> None:
        self.has_plan = has_plan(n, d_ff) if planned is None else planned
        super().__init__(regions(n, d_ff, dtype, self.has_plan), device)

    def packed(self, d_ff: int, finite: Tensor) -> TwELL:
        """Return the gate's TwELL as the layout module has it. It waits for the host: how many tiles spill is data."""
        heads, spill = self.tensor("heads"), self.tensor("spill")
        first = heads[:, :, :1] * finite[:, None, None]  # [n, tiles, 1]
        slot = torch.arange(LAYOUT.words, dtype=torch.int32, device=first.device)
        words = torch.where(slot <= first, torch.cat([heads, self.tensor("tails")], 2), 0)
        words[:, :, :1] = first
        is_dense = first[:, :, 0] > LAYOUT.slots  # past its slots, or marked as such: the tile lies in `spill`
        dense = _swizzled(spill[is_dense], is_dense)
        words[is_dense] = pack(dense, dense > 0, LAYOUT).words[:, 0]
        overflows = words[:, :, 0] > LAYOUT.slots
        return TwELL(LAYOUT, d_ff, spill.dtype, words, None, number_spilled(overflows), dense[overflows[is_dense]])

    def fill(self, packed: TwELL) -> None:
        """Write what the gate product would leave if it emitted `packed`, as `packed` above reads it."""
        row_sums, masks, fired = self.tensor("row_sums"), self.tensor("masks"), self.tensor("fired")
        self.tensor("heads").copy_(packed.words[:, :, :HEAD])
        self.tensor("tails").copy_(packed.words[:, :, HEAD:])
        row_sums.zero_()[: len(packed.words)] = packed.counts.sum(1)
        overflows = packed.spill_index >= 0
        dense = packed.spill[packed.spill_index[overflows].long()]
        self.tensor("spill")[overflows] = _swizzled(dense, overflows)
        bit = 1 << torch.arange(32, device=overflows.device)
        for block, rows in enumerate(unpack(packed).ne(0).split(BLOCK)):
            with_union = torch.cat([rows, rows.any(0, keepdim=True)])
            bits = (tile_view(with_union, LAYOUT).view(len(with_union), -1, 8, 32) * bit).sum(-1).int()
            masks[block * BLOCK : block * BLOCK + len(rows)], fired[block] = bits[:-1], bits[-1]


def _swizzled(dense: Tensor, tiles: Tensor) -> Tensor:
    """Return dense tiles with their 32 chunks of 8 columns in the order of `spill`, or from that order back: chunk c of
    row r lies at c ^ (r % 8).

    dense: [tiles, 256], in the order of the rows and tiles that `tiles`, bool [rows, tiles], marks
    """
    row, chunk = tiles.nonzero()[:, :1], torch.arange(32, device=tiles.device)
    index = (chunk ^ row % 8)[:, :, None].expand(-1, -1, 8)
    return dense.view(-1, 32, 8).gather(1, index).flatten(1)


class LazyTwELL(TwELL):
    """A pass's TwELL that is computed from its workspace when its words or spill are first read.

    Computing it waits for the host, which a call that never reads it, or reads it through `stored` alone, must not do.
    So these fields of TwELL are properties here, and TwELL's own constructor is not called.
    """

    def __init__(self, workspace: HopperWorkspace, d_ff: int, finite: Tensor) -> None:
        self.layout, self.d_ff, self.dtype, self.values = LAYOUT, d_ff, workspace.tensor("spill").dtype, None
        self._workspace, self._finite = workspace, finite

    @cached_property
    def _packed(self) -> TwELL:
        return self._workspace.packed(self.d_ff, self._finite)

    @property
    def words(self) -> Tensor:  # type: ignore[override]
        return self._packed.words

    @property
    def spill_index(self) -> Tensor:  # type: ignore[override]
        return self._packed.spill_index

    @property
    def spill(self) -> Tensor:  # type: ignore[override]
        return self._packed.spill

    @property
    def device(self) -> torch.device:
        return self._workspace.memory.device

    def stored(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        heads, tails, spill = (self._workspace.tensor(name) for name in ("heads", "tails", "spill"))
        return heads, tails, None, spill


def _passes(n: int, d_ff: int) -> Iterator[slice]:
    """Yield the rows of each pass."""
    row_bytes = d_ff * 37 // 8  # words, masks, spill and hidden: 1/2, 1/8, 2 and 2 bytes a neuron
    return gpu.passes(n, row_bytes, 2 * BLOCK)


def run(params: FFNParams) -> tuple[Tensor, Stats]:
    """Run a call of checked parameters: y [..., d_model] and its Stats."""
    n, d_ff = params.n, params.w_gate.shape[0]
    y, stats = gpu.results(params, in_full=True)
    packed = []
    for rows in _passes(n, d_ff):
        height = rows.stop - rows.start
        workspace = HopperWorkspace(height, d_ff, params.x.dtype, params.x.device, plans(params, height))
        launch(params, rows, workspace, y, stats)
        if params.want_packed:
            packed.append(LazyTwELL(workspace, d_ff, stats.finite[rows]))
    stats.packed = TwELL.cat([*packed]) if len(packed) > 1 else packed[0] if packed else None
    return y, stats


def prepare(params: FFNParams) -> RunAgain | None:
    """Return a function that runs checked parameters, which count nnz at most, again on another x [..., d_model] of the
    same shape: y, nnz and what is finite. None for calls in several passes, for a ReLU on both branches, and where the
    weights do not lie as the kernels read them.

    It is one op of two arguments, which makes workspace and results, where a call spends its time on the host. It has
    the weights' addresses alone: the caller keeps them.
    """
    d_ff, n = params.w_gate.shape[0], params.n
    weights = params.w_gate, params.w_up, params.w_down
    if params.up_relu or params.w_down.stride(0) != 1 or any(w is not None and w.data_ptr() % 16 for w in weights):
        return None
    if len(list(_passes(n, d_ff))) > 1:
        return None
    planned = plans(params, n)
    laid_out = regions(n, d_ff, params.x.dtype, planned)
    name = loaded_op(params.activation == "relu2", params.up_relu)
    begin, again = (getattr(torch.ops.twell, f"{name}_{part}").default for part in ("prepare", "again"))
    biases = params.b_gate, params.b_up, params.b_down
    counts = params.probes == "counts"
    call = begin(params.x, *weights, *biases, laid_out.offsets, laid_out.nbytes, n, counts, planned)
    return lambda x: again(x, call)  # type: ignore[no-any-return]


def launch(
    params: FFNParams,
    rows: slice,
    workspace: HopperWorkspace,
    y: Tensor,
    stats: Stats,
    stages: int = ALL_STAGES,
    added: Tensor | None = None,
) -> None:
    """Launch stages of the call for some of its rows on the current stream; sums are added to those in `stats`.

    added: like y, contiguous; is added to y once that is rounded
    """
    if not workspace.has_plan and not needs_words(params):
        stages &= ~NO_WORDS
    op = getattr(torch.ops.twell, loaded_op(params.activation == "relu2", params.up_relu))
    op(
        params.x, params.w_gate, params.w_up, params.w_down, params.b_gate, params.b_up, params.b_down,
        workspace.memory, workspace.offsets, y, stats.finite, stats.nnz_used, added, rows.start, rows.stop - rows.start,
        workspace.has_plan, int(stages), *gpu.count_arguments(params, stats),
    )  # fmt: skip


def stage_runs(params: FFNParams, packed: TwELL | None = None) -> dict[str, Callable[[], Any]]:
    """Return the gate product, and all that follows it, each to be run alone and again, for benchmarks.

    What follows runs on what the gate product leaves, or on `packed` in its place, and gives y. Calls without a plan
    have no such stages: an empty dict.
    """
    n, d_ff = params.n, params.w_gate.shape[0]
    if not plans(params, n):
        return {}
    params = replace(params, probes="none")
    (y, stats), workspace = gpu.results(params), HopperWorkspace(n, d_ff, params.x.dtype, params.x.device)
    launch_stages = partial(launch, params, slice(0, n), workspace, y, stats)

    def up_down() -> Tensor:
        launch_stages(Stage.PLAN | Stage.UP | Stage.DOWN)
        return y

    launch_stages(Stage.GATE)
    if packed is not None:
        workspace.fill(packed)
        return {"up_down": up_down}
    return {"gate": partial(launch_stages, Stage.GATE), "up_down": up_down}
