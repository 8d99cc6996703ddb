"""The `cuda` kernel: the FFN op on any NVIDIA GPU from sm_80 on, with mma.sync and asynchronous copies.

Four launches and no wait for the host. The gate product's epilogue leaves a bit a neuron that fired, and the values
of every eight neurons among which one did. A plan lists, for every block of rows, the union of the neurons that they
fire, and lays the rows' values out over it. Up and down are products over the union, whose weight rows are gathered as
cheaply as neighbours are read; a union of everything is the dense product. Counts, and TwELL of any layout, are read
from the bits. No row is too dense, and sums have one order, set by shapes and inputs: same parameters, same bits.

Cost: the gate product in full, up and down by the size of the unions. Workspace is worst case, from torch's allocator,
and touched only where it is used: 24 KB a row at d_ff 5632. Few rows come in lower, narrower tiles. On Hopper GPUs,
whose dense products run twice as fast as mma.sync's, this is for calls that `hopper` lacks something of: ahead of
counting in torch on all that is sparse and level with it where everything fires; ahead of the dense FFN where unions
stay under a quarter of d_ff.

    y, stats = gated_ffn(x, w_gate, w_up, w_down, kernel="cuda")
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from twell.kernels import build
from twell.kernels.backends import gpu
from twell.kernels.backends.gpu import Stage
from twell.kernels.build import Library, Source
from twell.kernels.layout import Layout, TwELL
from twell.kernels.params import FFNParams
from twell.kernels.stats import Stats

ALL_STAGES = int(Stage.GATE | Stage.PLAN | Stage.UP | Stage.DOWN | Stage.COUNTS | Stage.PACK)
COLUMNS = {16: 32, 64: 128}  # of the tiles of `up`, by the rows of a block
FEW_ROWS = 256  # up to which blocks are of 16 rows
MAX_D_FF = 2**18

Capability = tuple[int, int]


@cache
def library(capabilities: tuple[Capability, ...]) -> Library:
    """Return the sources, for GPUs of these compute capabilities."""
    arch = [f"-gencode=arch=compute_{major}{minor},code=sm_{major}{minor}" for major, minor in capabilities]
    typed = [
        Source(f"cuda/{stage}.cu", (*arch, f"-DTWELL_T={value}"))
        for stage in ("gate", "up", "down", "probes")
        for value in ("__nv_bfloat16", "__half")
    ]
    sources = (*typed, Source("cuda/plan.cu", tuple(arch)), Source("cuda/bindings.cpp"))
    fakes = (("twell::cuda_ffn", lambda *_: None),)
    return Library("cuda", sources, headers=("common/*", "cuda/*"), seconds=10, cuda=True, fakes=fakes)


def refuses(device: torch.device, dtype: torch.dtype, d_model: int, d_ff: int, n: int, _: object = None) -> str | None:
    """Return why this kernel cannot take a call of n rows, or None. Compiles it to find out, once a process."""
    if (reason := gpu.refuses(device, dtype, n)) is not None:
        return reason
    if d_ff > MAX_D_FF:
        return f"expected d_ff up to {MAX_D_FF}, as a union lies in shared memory, got {d_ff}"
    if d_model * d_ff >= 2**35:
        return f"expected weights of less than 2^35 values, got {d_ff} x {d_model}"
    return _cannot_run(device)


@build.constant
def _cannot_run(device: torch.device) -> str | None:
    """Return what the machine lacks, or why the build failed; None if the kernel runs."""
    if (reason := gpu.missing()) is not None:
        return reason
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"expected a GPU of compute capability 8.0 or newer, got {torch.cuda.get_device_name(device)}"
    present = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return build.failure(library(tuple(sorted(at for at in present if at >= (8, 0)))))


@gpu.remembered
def regions(n: int, d_ff: int, dtype: torch.dtype, block: int) -> gpu.Regions:
    """Return the regions of the workspace of n rows, in blocks of `block` rows."""
    blocks, tiles = -(-n // block), -(-d_ff // COLUMNS[block])
    return gpu.Regions.laid_out(
        masks=(torch.int32, (n, -(-d_ff // 32))),
        lists=(torch.int32, (blocks, d_ff)),
        sizes=(torch.int32, (blocks,)),
        hidden=(dtype, (blocks * block, d_ff)),
        tasks=(torch.int32, (1 + blocks * tiles, 2)),
    )


class CudaWorkspace(gpu.Workspace):
    """The workspace of one pass of n rows, and what outlasts it: the values, and TwELL in `layout` (None: no TwELL)."""

    def __init__(self, n: int, d_ff: int, layout: Layout | None, dtype: torch.dtype, device: torch.device) -> None:
        self.block = 16 if n <= FEW_ROWS else 64
        super().__init__(regions(n, d_ff, dtype, self.block), device)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.layout = layout
        self.values = empty(n, d_ff if layout is None else layout.tiles(d_ff) * layout.tile, dtype=dtype)
        self.words = None if layout is None else empty(n, layout.tiles(d_ff), layout.words)
        self.spill_index = None if layout is None else empty(n, layout.tiles(d_ff))

    def tensors(self) -> tuple[Tensor, ...]:
        return *super().tensors(), self.values

    def packed(self, d_ff: int) -> list[TwELL]:
        """Return the TwELL in a list, empty where none was wanted. Overflowing tiles lie in place in `values`."""
        if self.layout is None or self.words is None or self.spill_index is None:
            return []
        spill = self.values.view(-1, self.layout.tile)
        return [TwELL(self.layout, d_ff, spill.dtype, self.words, None, self.spill_index, spill)]


def run(params: FFNParams) -> tuple[Tensor, Stats]:
    """Run a call of checked parameters: y [..., d_model] and its Stats."""
    n, (d_ff, d_model) = params.n, params.w_gate.shape
    y, stats = gpu.results(params)
    layout = (params.layout or Layout()) if params.want_packed else None
    packed = []
    row_bytes = max(d_ff * 9 // 2, d_model)  # masks, values, lists and hidden: 1/8, 2, 1/4 and 2 bytes a neuron
    for rows in gpu.passes(n, row_bytes, max(COLUMNS)):
        workspace = CudaWorkspace(rows.stop - rows.start, d_ff, layout, params.x.dtype, params.x.device)
        launch(params, rows, workspace, y, stats)
        packed += workspace.packed(d_ff)
    stats.packed = TwELL.cat(packed) if len(packed) > 1 else packed[0] if packed else None
    return y, stats


def launch(
    params: FFNParams, rows: slice, workspace: CudaWorkspace, y: Tensor, stats: Stats, stages: int = ALL_STAGES
) -> None:
    """Launch stages of the call for some of its rows on the current stream; sums are added to those in `stats`."""
    layout = workspace.layout or params.layout or Layout()
    torch.ops.twell.cuda_ffn(
        params.x, params.w_gate, params.w_up, params.w_down, params.b_gate, params.b_up, params.b_down,
        workspace.memory, workspace.offsets, workspace.values, y, stats.finite, stats.nnz_used,
        workspace.words, workspace.spill_index, rows.start, rows.stop - rows.start,
        params.activation == "relu2", params.up_relu, workspace.block, layout.tile, int(stages),
        *gpu.count_arguments(params, stats),
    )  # fmt: skip
