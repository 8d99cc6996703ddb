"""The `hopper` kernel: the FFN op on tensor cores of sm_90a, dense in the gate and over each block's union afterwards.

Five launches, which overlap, and no wait for the host. One zeroes what the gate product adds to, whose epilogue emits
TwELL. A plan puts rows in order of nnz within windows of 1024, where that pays, so that the few that fire many neurons
share blocks; it lists, for every 128 rows in that order, the union of the neurons they fire, and lays the gate values
out over it. Up and down are products over the union, whose weight rows are gathered once a block; where the union is
nearly everything they read whole weight tiles instead. Of up to 64 blocks such tiles need no plan: the gate's kernel
goes on with their up products, as it comes to have them. Of up to 256 blocks the down product's work is shared out
evenly: what one multiprocessor begins another may go on with. Further launches count what is asked for besides nnz.
Sums have one order, set by shapes and inputs: same call, same bits.

Small calls take two launches, which overlap, and no plan: gate and up together by tiles of 128 rows and up to 256
neurons, or of 256 and 176, down over what the tiles of a block's rows have fired; up to 64 rows are one block. Small is
what has few tiles in the gate product: up to 2 048 rows at d_ff 5632.

Cost: the gate product in full, up and down by the size of the unions (a block's union is about 15 times a row's nnz in
text). Workspace is worst case, one allocation of torch's, touched only where it is used: 26 KB a row at d_ff 5632.

    y, stats = gated_ffn(x, w_gate, w_up, w_down, kernel="hopper")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from twell.kernels import build
from twell.kernels.backends import gpu
from twell.kernels.backends.gpu import Stage
from twell.kernels.build import Library, Source
from twell.kernels.layout import Layout, TwELL, pack, tile_view, unpack
from twell.kernels.params import FFNParams, Requirements, Stats

LAYOUT = Layout(tile=256, compression=8)  # what the gate product emits
BLOCK, PANEL = 128, 64  # rows that share a union; columns of a hidden panel
OUTPUTS = 256  # columns of y that the down product makes at once
WINDOW = 1024  # rows that are put in order of nnz before they are cut into blocks
HEAD = 8  # words of a tile that lie apart from the others, as most tiles need no more
FEW_TILES = 352  # of the gate product: up to so many, a call has no order, no plan and, unless asked for, no words
PARTS = 144  # sums of a tile of y that can be left for others at once: as many as a GH100 has multiprocessors
ALL_STAGES = int(Stage.GATE | Stage.PLAN | Stage.UP | Stage.DOWN | Stage.COUNTS)
NO_WORDS = int(Stage.PLAN | Stage.COUNTS)  # needless without a plan where nnz alone is requested

_ARCH = "-gencode=arch=compute_90a,code=sm_90a"
LIBRARY = Library(
    "hopper",
    (
        *(
            Source(f"hopper/{source}.cu", (_ARCH, f"-DTWELL_T={value}"))
            for source in (
                "many_rows/gate",
                "many_rows/plan",
                "many_rows/up",
                "many_rows/down",
                "few_rows/launch",
                "mid_rows/launch",
                "probes",
            )
            for value in ("__nv_bfloat16", "__half")
        ),
        Source("hopper/bindings.cpp"),
    ),
    headers=("common/*", "hopper/**/*.cuh", "hopper/**/*.h"),
    seconds=15,
    cuda=True,
    fakes=(("twell::hopper_ffn", lambda *_: None),),
)


def refuses(device: torch.device, dtype: torch.dtype, d_model: int, d_ff: int, n: int) -> str | None:
    """Why this kernel cannot take such a call; builds it to find out, once a process."""
    if (reason := gpu.refuses(device, dtype, n)) is not None:
        return reason
    if d_ff > 2**16 - 8:
        return f"expected d_ff up to {2**16 - 8}, as a union holds 16-bit numbers, got {d_ff}"
    if d_model * d_ff >= 2**31:
        return f"expected weights of less than 2^31 values, as offsets are 32 bits of bytes, got {d_ff} x {d_model}"
    return _cannot_run(device)


@build.constant
def _cannot_run(device: torch.device) -> str | None:
    """What the machine lacks, or what the build failed of."""
    if (reason := gpu.missing()) is not None:
        return reason
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"expected a GPU of compute capability 9.0, got {torch.cuda.get_device_name(device)}"
    return build.failure(LIBRARY)


def lacks(asks: Requirements | FFNParams) -> str | None:
    """What a call asks for that this kernel does not have."""
    if asks.activation != "relu" or asks.up_relu or asks.threshold is not None:
        got = asks.activation + (", and a ReLU on the up branch" if asks.up_relu else "")
        got += "" if asks.threshold is None else f" with threshold {asks.threshold}"
        return f"expected relu and no threshold, got {got}"
    if asks.layout is None or asks.layout == LAYOUT or (asks.layout.tile == LAYOUT.tile and not asks.want_packed):
        return None
    return f"expected tiles of {LAYOUT.tile} at compression {LAYOUT.compression}, got {asks.layout}"


def planned(n: int, d_ff: int) -> bool:
    """Whether a pass of so many rows has an order and a plan: they cost what small ones do not gain."""
    return -(-n // BLOCK) * LAYOUT.tiles(d_ff) > FEW_TILES


@gpu.remembered
def parts(n: int, d_ff: int, dtype: torch.dtype, plan: bool) -> gpu.Parts:
    """Of the workspace of n rows, in the order in which the op takes them: of the gate, of the plan, of `down`."""
    tiles, panels, blocks = LAYOUT.tiles(d_ff), -(-d_ff // PANEL), -(-n // BLOCK)
    whole = 3 * -(-n // WINDOW) + 2 * -(-blocks // 2) * tiles  # words that say what lies whole
    shared = PARTS if plan else 0
    return gpu.Parts.laid_out(
        heads=(torch.int32, (n, tiles, HEAD)),
        tails=(torch.int32, (n, tiles, LAYOUT.words - HEAD)),
        masks=(torch.int32, (n, tiles, LAYOUT.tile // 32)),
        spill=(dtype, (n, tiles, LAYOUT.tile)),
        fired=(torch.int32, (blocks, tiles, LAYOUT.tile // 32)),
        row_sums=(torch.int32, (n + 1 + whole,)),
        order=(torch.int32, (-(-n // WINDOW) * WINDOW,)),
        unions=(torch.int16, (blocks, panels * PANEL)),
        union_sizes=(torch.int32, (blocks,)),
        hidden=(dtype, (blocks, panels, BLOCK, PANEL)),
        tasks=(torch.int32, (blocks * panels, 2)),
        parts=(torch.float32, (shared, BLOCK, OUTPUTS)),
        part_ready=(torch.int32, (shared, 8)),  # by warps
    )


class Workspace(gpu.Workspace):
    """That of one pass. n: rows."""

    def __init__(self, n: int, d_ff: int, dtype: torch.dtype, device: torch.device) -> None:
        self.planned = planned(n, d_ff)
        super().__init__(parts(n, d_ff, dtype, self.planned), device)

    def packed(self, d_ff: int, finite: Tensor) -> TwELL:
        """The gate's TwELL as the layout module has it. Waits for the host: how many tiles spill is data."""
        first = self.heads[:, :, :1] * finite[:, None, None]  # [n, tiles, 1]
        slot = torch.arange(LAYOUT.words, dtype=torch.int32, device=first.device)
        words = torch.where(slot <= first, torch.cat([self.heads, self.tails], 2), 0)
        words[:, :, :1] = first
        whole = first[:, :, 0] > LAYOUT.slots  # in `spill`: past its slots, or marked so
        row, chunk = whole.nonzero()[:, :1], torch.arange(32, device=first.device)  # eight columns to a chunk
        spill = self.spill[whole].view(-1, 32, 8).gather(1, (chunk ^ row % 8)[:, :, None].expand(-1, -1, 8)).flatten(1)
        words[whole] = pack(spill, spill > 0, LAYOUT).words[:, 0]
        over = words[:, :, 0] > LAYOUT.slots
        index = torch.where(over, over.flatten().cumsum(0).view_as(over) - 1, -1).int()
        return TwELL(LAYOUT, d_ff, self.spill.dtype, words, None, index, spill[over[whole]])

    def fill(self, packed: TwELL) -> None:
        """Leaves what the gate product leaves where it emits `packed`, as `packed` above reads it."""
        self.heads.copy_(packed.words[:, :, :HEAD])
        self.tails.copy_(packed.words[:, :, HEAD:])
        self.row_sums.zero_()[: len(packed.words)] = packed.words[:, :, 0].sum(1)
        over = packed.spill_index >= 0
        row, chunk = over.nonzero()[:, :1], torch.arange(32, device=over.device)
        spill = packed.spill[packed.spill_index[over].long()].view(-1, 32, 8)
        bit = 1 << torch.arange(32, device=over.device)
        self.spill[over] = spill.gather(1, (chunk ^ row % 8)[:, :, None].expand(-1, -1, 8)).flatten(1)
        for at, rows in enumerate(unpack(packed).ne(0).split(BLOCK)):
            fired = torch.cat([rows, rows.any(0, keepdim=True)])
            masks = (tile_view(fired, LAYOUT).view(len(fired), -1, 8, 32) * bit).sum(-1).int()
            self.masks[at * BLOCK : at * BLOCK + len(rows)], self.fired[at] = masks[:-1], masks[-1]


class Unread(TwELL):
    """What one pass left in its workspace, put in order when somebody asks for it; that waits for the host."""

    def __init__(self, workspace: Workspace, d_ff: int, finite: Tensor) -> None:
        self.layout, self.d_ff, self.dtype, self.values = LAYOUT, d_ff, workspace.spill.dtype, None
        self._workspace, self._finite = workspace, finite

    def __getattr__(self, name: str) -> Tensor:
        if name not in ("words", "spill_index", "spill"):
            raise AttributeError(name)
        self.__dict__.update(vars(self._workspace.packed(self.d_ff, self._finite)))
        return self.__dict__[name]

    @property
    def device(self) -> torch.device:
        return self._workspace.heads.device

    def stored(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        return self._workspace.heads, self._workspace.tails, None, self._workspace.spill


def run(call: FFNParams) -> tuple[Tensor, Stats]:
    """Runs a checked call: y [..., d_model] and its Stats."""
    n, d_ff = call.n, call.w_gate.shape[0]
    y, stats = gpu.results(call, in_full=True)
    row_bytes = d_ff * 37 // 8  # words, masks, spill and hidden: 1/2, 1/8, 2 and 2 bytes a neuron
    packed = []
    for rows in gpu.passes(n, row_bytes, 2 * BLOCK):
        workspace = Workspace(rows.stop - rows.start, d_ff, call.x.dtype, call.x.device)
        launch(call, rows, workspace, y, stats)
        if call.want_packed:
            packed.append(Unread(workspace, d_ff, stats.finite[rows]))
    stats.packed = TwELL.cat([*packed]) if len(packed) > 1 else packed[0] if packed else None
    return y, stats


def launch(
    call: FFNParams, rows: slice, workspace: Workspace, y: Tensor, stats: Stats, stages: int = ALL_STAGES
) -> None:
    """Launches some stages for some rows on the current stream; the neurons' sums add to those in `stats`."""
    if not workspace.planned and stats.tiles is None and stats.neurons is None and not call.want_packed:
        stages &= ~NO_WORDS
    torch.ops.twell.hopper_ffn(
        call.x, call.w_gate, call.w_up, call.w_down, call.b_gate, call.b_up, call.b_down,
        workspace.memory, workspace.places, y, stats.finite, rows.start, rows.stop - rows.start,
        workspace.planned, int(stages), *gpu.count_arguments(call, stats),
    )  # fmt: skip


def stages(call: FFNParams, packed: TwELL | None = None) -> dict[str, Callable[[], Any]]:
    """For benchmarks: the gate product, and all that follows it, each to be run alone and again.

    What follows runs on what the gate product leaves, or on `packed` in its place, and gives y. Calls without a plan
    have no such stages: an empty answer.
    """
    n, d_ff = call.n, call.w_gate.shape[0]
    if not planned(n, d_ff):
        return {}
    call = replace(call, probes="none")
    (y, stats), workspace = gpu.results(call), Workspace(n, d_ff, call.x.dtype, call.x.device)
    do = partial(launch, call, slice(0, n), workspace, y, stats)

    def up_down() -> Tensor:
        do(Stage.PLAN | Stage.UP | Stage.DOWN)
        return y

    do(Stage.GATE)
    if packed is not None:
        workspace.fill(packed)
        return {"up_down": up_down}
    return {"gate": partial(do, Stage.GATE), "up_down": up_down}
