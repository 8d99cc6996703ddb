"""The host side that kernels on NVIDIA GPUs share: workspaces, results to write to, passes over rows, the counts.

A call outside a CUDA graph may take the host longer than the GPU. So a workspace is one allocation, whose regions
become tensors only where they are read in Python, and counts that are not required are neither allocated nor passed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntFlag
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from twell.kernels.params import FFNParams
from twell.kernels.stats import NeuronSums, Stats, TileCounts

MAX_WORKSPACE = 4 * 2**30  # bytes; rows past it take another pass
ALIGNED = 256  # bytes, as what torch allocates is

Function = TypeVar("Function", bound=Callable[..., Any])
TensorSpec = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a region of a workspace


class Stage(IntFlag):
    """The stages of a call, as bits that add up: those of csrc/common/stages.h, which says what each launches."""

    GATE = 1
    PLAN = 2
    UP = 4
    DOWN = 8
    COUNTS = 16
    PACK = 32
    LEAVE_DENSE = 64
    NEXT_WAVE = 128
    WIDE_GROUPS = 256


def refuses(device: torch.device, dtype: torch.dtype, n: int) -> str | None:
    """Return why none of them can take a call of n rows; None if one may."""
    if device.type != "cuda":
        return f"expected device cuda, got {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"expected bfloat16 or float16, got {str(dtype).removeprefix('torch.')}"
    return None if n else "expected at least 1 row, got 0"


def missing() -> str | None:
    """Return what the machine lacks for any of them; None if nothing."""
    if torch.version.hip or not torch.cuda.is_available():
        return "expected a CUDA device that torch can use, found none"
    return None


def not_hopper(device: torch.device) -> str | None:
    """Return what the machine lacks for kernels of compute capability 9.0; None if nothing."""
    if (reason := missing()) is not None:
        return reason
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"expected a GPU of compute capability 9.0, got {torch.cuda.get_device_name(device)}"
    return None


@dataclass(frozen=True)
class Regions:
    """The regions of a workspace by name, the byte at which each begins, and the bytes that all of them take."""

    specs: dict[str, TensorSpec]
    offsets: tuple[int, ...]
    nbytes: int

    @classmethod
    def laid_out(cls, **specs: TensorSpec) -> Regions:
        """Lay regions out one after the other, in the order in which the op takes their offsets."""
        offsets, end = [], 0
        for dtype, shape in specs.values():
            offsets.append(end)
            end += -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
        return cls(specs, tuple(offsets), end)


def remembered(function: Function) -> Function:
    """Cache a function's results, but trace the function itself under torch.compile, which warns of lru_cache."""
    cached = lru_cache(maxsize=256)(function)

    @wraps(function)
    def either(*arguments: Any) -> Any:
        return (function if torch.compiler.is_compiling() else cached)(*arguments)

    return either  # type: ignore[return-value]


class Workspace:
    """The memory through which the launches of one pass hand on their results: one allocation, cut into regions.

    memory: uint8, the allocation; offsets: the byte of it at which each region begins
    """

    def __init__(self, regions: Regions, device: torch.device) -> None:
        self.memory = torch.empty(regions.nbytes, dtype=torch.uint8, device=device)
        self.offsets, self._specs = regions.offsets, regions.specs

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the regions, in the order of `offsets`."""
        return tuple(self._specs)

    def tensor(self, name: str) -> Tensor:
        """Return a region as a tensor, a view of `memory`."""
        dtype, shape = self._specs[name]
        begin = self.offsets[self.names.index(name)]
        return self.memory[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all memory that launches write to and that is no result: every region, and what subclasses add."""
        return tuple(self.tensor(name) for name in self.names)


def results(params: FFNParams, *, in_full: bool = False) -> tuple[Tensor, Stats]:
    """Allocate y and the Stats of a call: y and nnz unwritten, sums of nothing, to which launches add.

    in_full: the launches write all of `finite`, so it is left unwritten; else it begins as True
    """
    x, n, device = params.x, params.n, params.x.device
    y = torch.empty(x.shape, dtype=x.dtype, device=device)
    finite = (torch.empty if in_full else torch.ones)(n, dtype=torch.bool, device=device)
    stats = Stats(torch.empty(0 if params.probes == "none" else n, dtype=torch.int32, device=device), finite)
    if params.probes == "none":
        return y, stats
    if params.up_relu and params.w_up is not None:
        stats.nnz_used = torch.zeros(n, dtype=torch.int32, device=device)
    if params.layout is not None:
        zeros = torch.zeros(2, params.layout.tile + 1, dtype=torch.int64, device=device)
        stats.tiles = TileCounts(params.layout, zeros[0], zeros[1])
    if params.probes == "neurons":
        stats.neurons = NeuronSums.empty(params.w_gate.shape[0], device)
    return y, stats


def passes(n: int, row_bytes: int, multiple: int) -> Iterator[slice]:
    """Yield the rows of each pass: as many multiples of `multiple` as fit MAX_WORKSPACE at row_bytes each."""
    step, at = max(1, MAX_WORKSPACE // (row_bytes * multiple)) * multiple, 0
    while at < n:  # for a range of n rows torch.compile would trace each number of rows anew
        yield slice(at, min(at + step, n))
        at += step


def count_arguments(params: FFNParams, stats: Stats) -> tuple[Tensor | None, ...]:
    """Return the last arguments of the ops: nnz, and nothing further unless the call counts more than that; then rows,
    tokens and sequences; the pairs and rows of the histograms; the sums of neurons. None for what is not counted."""
    nnz = None if params.probes == "none" else stats.nnz
    tiles, sums = stats.tiles, stats.neurons
    if tiles is None and sums is None:
        return (nnz,)
    info = (params.rows, params.tokens, params.sequences) if sums is not None else (params.rows, None, None)
    return (
        nnz,
        *info,
        *((None, None) if tiles is None else (tiles.pairs, tiles.rows)),
        *(() if sums is None else sums.tensors()),
    )
