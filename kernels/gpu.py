"""What kernels on NVIDIA GPUs share on the host: results to write to, passes over rows, arguments of the counts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from twell.kernels.call import Call, NeuronSums, Stats, TileCounts

MAX_WORKSPACE = 4 * 2**30  # bytes; rows past it take another pass


def refuses(device: torch.device, dtype: torch.dtype, n: int) -> str | None:
    """Why none of them can take a call of n rows."""
    if device.type != "cuda":
        return f"expected device cuda, got {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"expected bfloat16 or float16, got {str(dtype).removeprefix('torch.')}"
    return None if n else "expected at least 1 row, got 0"


def missing() -> str | None:
    """What the machine lacks for any of them."""
    if torch.version.hip or not torch.cuda.is_available():
        return "expected a CUDA device that torch can use, found none"
    return None


def results(call: Call, *, in_full: bool = False) -> tuple[Tensor, Stats]:
    """y unwritten, and Stats of nothing counted yet: nnz unwritten, sums that launches add to, and `finite` ones, or
    unwritten where the launches write it `in_full`."""
    n, d_ff, device = call.x.shape[0], call.w_gate.shape[0], call.x.device
    y = torch.empty_like(call.x, memory_format=torch.contiguous_format)
    finite = (torch.empty if in_full else torch.ones)(n, dtype=torch.uint8, device=device).view(torch.bool)
    stats = Stats(torch.empty(0 if call.probes == "none" else n, dtype=torch.int32, device=device), finite)
    if call.probes == "none":
        return y, stats
    if call.up_relu and call.w_up is not None:
        stats.nnz_used = torch.zeros(n, dtype=torch.int32, device=device)
    if call.layout is not None:
        zeros = torch.zeros(2, call.layout.tile + 1, dtype=torch.int64, device=device)
        stats.tiles = TileCounts(call.layout, zeros[0], zeros[1])
    if call.probes == "neurons":
        stats.neurons = NeuronSums.empty(d_ff, device)
    return y, stats


def passes(n: int, row_bytes: int, multiple: int) -> Iterator[slice]:
    """The rows of each pass: multiples of `multiple` that fit the workspace."""
    step = max(1, MAX_WORKSPACE // (row_bytes * multiple)) * multiple
    for at in range(0, n, step):
        yield slice(at, min(at + step, n))


def count_arguments(call: Call, stats: Stats, rows: slice) -> tuple[Tensor | None, ...]:
    """counted, tokens, sequences; nnz; the histograms' pairs and rows; the neurons' six: None what is not asked for."""
    info = (call.rows, call.tokens, call.sequences) if stats.neurons is not None else (call.rows, None, None)
    tiles, sums = stats.tiles, stats.neurons
    return (
        *(None if part is None else part[rows] for part in info),
        None if call.probes == "none" else stats.nnz[rows],
        *((None, None) if tiles is None else (tiles.pairs, tiles.rows)),
        *((None,) * 6 if sums is None else (
            sums.fires, sums.value_sum, sums.value_max, sums.token_min, sums.token_max, sums.first_sequence,
        )),
    )  # fmt: skip


def aligned(tensor: Tensor) -> Tensor:
    """The tensor at an address that copies of 16 bytes take; torch.compile's are."""
    return tensor if torch.compiler.is_compiling() or tensor.data_ptr() % 16 == 0 else tensor.clone()
