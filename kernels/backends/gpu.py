"""What kernels on NVIDIA GPUs share on the host: workspaces, results to write to, passes over rows, the counts.

A call outside a CUDA graph may take the host longer than the GPU. So a workspace is one allocation, whose parts become
tensors only where somebody reads them, and what is not asked for is neither made nor handed over.
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

from twell.kernels.params import FFNParams, NeuronSums, Stats, TileCounts

MAX_WORKSPACE = 4 * 2**30  # bytes; rows past it take another pass
ALIGNED = 256  # bytes, as what torch allocates is

Function = TypeVar("Function", bound=Callable[..., Any])
Part = tuple[torch.dtype, tuple[int, ...]]  # what it holds, and its shape


class Stage(IntFlag):
    """The stages of a call, as bits that add up: those of csrc/common/stages.h, which says what each launches."""

    GATE = 1
    PLAN = 2
    UP = 4
    DOWN = 8
    COUNTS = 16
    PACK = 32


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


@dataclass(frozen=True)
class Parts:
    """The parts of a workspace by name, the byte at which each begins, and the bytes that all of them take."""

    kinds: dict[str, Part]
    places: tuple[int, ...]
    nbytes: int

    @classmethod
    def laid_out(cls, **kinds: Part) -> Parts:
        """One after the other."""
        places, at = [], 0
        for dtype, shape in kinds.values():
            places.append(at)
            at += -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
        return cls(kinds, tuple(places), at)


def remembered(function: Function) -> Function:
    """functools.lru_cache, of which torch.compile would warn: it traces the function itself."""
    cached = lru_cache(maxsize=256)(function)

    @wraps(function)
    def either(*arguments: Any) -> Any:
        return (function if torch.compiler.is_compiling() else cached)(*arguments)

    return either  # type: ignore[return-value]


class Workspace:
    """What the launches of one pass leave each other: parts of one allocation, each a tensor where it is read.

    memory: uint8, the allocation; places: int64, the byte at which each part begins, counted from there
    """

    def __init__(self, parts: Parts, device: torch.device) -> None:
        self.memory = torch.empty(parts.nbytes, dtype=torch.uint8, device=device)
        self.places, self._kinds = parts.places, parts.kinds

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parts, in the order of `places`."""
        return tuple(self._kinds)

    def __getattr__(self, name: str) -> Tensor:
        if name.startswith("_") or name not in self._kinds:
            raise AttributeError(name)
        (dtype, shape), at = self._kinds[name], self.places[self.names.index(name)]
        return self.memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def tensors(self) -> tuple[Tensor, ...]:
        """All parts."""
        return tuple(getattr(self, name) for name in self.names)


def results(call: FFNParams, *, in_full: bool = False) -> tuple[Tensor, Stats]:
    """y unwritten, and Stats of nothing counted yet: nnz unwritten, sums that launches add to, and `finite` ones, or
    unwritten where the launches write it `in_full`."""
    x, n, device = call.x, call.n, call.x.device
    y = torch.empty(x.shape, dtype=x.dtype, device=device)
    finite = (torch.empty if in_full else torch.ones)(n, dtype=torch.bool, device=device)
    stats = Stats(torch.empty(0 if call.probes == "none" else n, dtype=torch.int32, device=device), finite)
    if call.probes == "none":
        return y, stats
    if call.up_relu and call.w_up is not None:
        stats.nnz_used = torch.zeros(n, dtype=torch.int32, device=device)
    if call.layout is not None:
        zeros = torch.zeros(2, call.layout.tile + 1, dtype=torch.int64, device=device)
        stats.tiles = TileCounts(call.layout, zeros[0], zeros[1])
    if call.probes == "neurons":
        stats.neurons = NeuronSums.empty(call.w_gate.shape[0], device)
    return y, stats


def passes(n: int, row_bytes: int, multiple: int) -> Iterator[slice]:
    """The rows of each pass: multiples of `multiple` that fit the workspace."""
    step, at = max(1, MAX_WORKSPACE // (row_bytes * multiple)) * multiple, 0
    while at < n:  # for a range of n rows torch.compile would trace each number of rows anew
        yield slice(at, min(at + step, n))
        at += step


def count_arguments(call: FFNParams, stats: Stats) -> tuple[Tensor | None, ...]:
    """What ops take last: nnz, and nothing further unless more is asked for. Then counted, tokens and sequences; the
    histograms' pairs and rows; the neurons' six: None what is not asked for."""
    nnz = None if call.probes == "none" else stats.nnz
    tiles, sums = stats.tiles, stats.neurons
    if tiles is None and sums is None:
        return (nnz,)
    info = (call.rows, call.tokens, call.sequences) if sums is not None else (call.rows, None, None)
    return (
        nnz,
        *info,
        *((None, None) if tiles is None else (tiles.pairs, tiles.rows)),
        *(() if sums is None else (
            sums.fires, sums.value_sum, sums.value_max, sums.token_min, sums.token_max, sums.first_sequence,
        )),
    )  # fmt: skip
