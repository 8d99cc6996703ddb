"""The `cpu` kernel: the FFN op in C++, on every core, with the widest vectors the processor has.

The gate product runs dense over packed panels; a row's fired neurons then take one dot product with the up weights
and one scaled row of the down weights each. Where too many fire, a block of rows goes on densely, so that no density
is slow and any is exact. Sums have one order, set by shapes: the same bits on any number of threads. In a forked child
one thread runs, here and in torch: the parent's threads are not there, and OpenMP would wait for them for ever.

Cost: the gate product, a third of the dense FFN, and about 60 cycles for a fired neuron at d_model 256 in AVX-512.
The sources are compiled on first use, once for each kind of vector unit.

    y, stats = gated_ffn(x, w_gate, w_up, w_down, kernel="cpu")
"""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
from torch import Tensor

from twell.kernels import build
from twell.kernels.backends.reference import tile_counts
from twell.kernels.build import Library, Source
from twell.kernels.layout import Layout, TwELL
from twell.kernels.params import FFNParams
from twell.kernels.stats import NeuronSums, Stats

DTYPES = (torch.float32, torch.bfloat16)
NEURON_SUMS = NeuronSums.dtypes()  # of the sums that the op returns
X86 = platform.machine() in ("x86_64", "AMD64")
AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
LEVELS = {"portable": (), **({"avx2": AVX2, "avx512": AVX512} if X86 else {})}
FLAGS = ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", *["-DTWELL_X86"] * X86)
TOO_OLD = X86 and torch.backends.cpu.get_cpu_capability() == "DEFAULT"


def _run_on_one_thread() -> None:
    """Set torch's threads to one, as torch's own workers that load data do: those of the parent are not in a fork."""
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_run_on_one_thread)


def fake(x: Tensor, w_gate: Tensor, *rest: Any) -> list[Tensor]:
    """Empty results of the shapes that the op returns; its arguments in order."""
    up_relu, counts, neurons, tile, words, _ = rest[-6:]
    (n, _), d_ff, int32 = x.shape, w_gate.shape[0], torch.int32
    tiles = -(-d_ff // tile) if tile else 0
    shapes: list[tuple[torch.dtype, tuple[Any, ...]]] = [(x.dtype, x.shape), (torch.bool, (n,))]
    shapes += [(int32, (n,))] * (counts + (counts and up_relu)) + [(int32, (n, tiles))] * (tile > 0)
    if neurons:
        shapes += [(dtype, (d_ff,)) for dtype in NEURON_SUMS]
    if words:
        spilled = torch.library.get_ctx().new_dynamic_size()
        values = [(torch.float32, (n, tiles, words - 1))] * (x.dtype is torch.float32)
        shapes += [(int32, (n, tiles, words)), *values, (int32, (n, tiles)), (x.dtype, (spilled, tile))]
    return [x.new_empty(shape, dtype=dtype) for dtype, shape in shapes]


LIBRARY = Library(
    "cpu",
    (
        *(Source("cpu/ffn.cpp", (f"-DTWELL_LEVEL={name}", *FLAGS, *flags)) for name, flags in LEVELS.items()),
        Source("cpu/bindings.cpp", FLAGS),
    ),
    headers=("common/arguments.h", "common/probes.h", "cpu/*.h"),
    seconds=20,
    fakes=(("twell::cpu_ffn", fake),),
)


def refuses(device: torch.device, dtype: torch.dtype, d_model: int, d_ff: int, n: int, _: object = None) -> str | None:
    """Return why this kernel cannot take a call of n rows, or None. Compiles it to find out, once a process."""
    if device.type != "cpu":
        return f"expected device cpu, got {device.type}"
    if dtype not in DTYPES:
        return f"expected float32 or bfloat16, got {str(dtype).removeprefix('torch.')}"
    if TOO_OLD:
        return "expected a processor with AVX2 and FMA, got one without"
    return build.failure(LIBRARY)


def run(params: FFNParams, level: int = -1) -> tuple[Tensor, Stats]:
    """Run a call of checked parameters: y [..., d_model] and its Stats.

    level: vector units to use: 0 portable, 1 AVX2, 2 AVX-512, -1 the best that the processor has
    """
    x, params = params.x, params.flat()
    counts, neurons = params.probes != "none", params.probes == "neurons"
    layout = params.layout or (Layout() if params.want_packed else None)
    tile = layout.tile if layout is not None and (counts or params.want_packed) else 0
    words = layout.words if layout is not None and params.want_packed else 0
    y, finite, *counted = torch.ops.twell.cpu_ffn(
        params.x, params.w_gate, params.w_up, params.down_by_neuron, params.b_gate, params.b_up, params.b_down,
        params.rows, params.tokens if neurons else None, params.sequences if neurons else None,
        params.activation == "relu2", params.up_relu, counts, neurons, tile, words, level,
    )  # fmt: skip
    stats = Stats(counted.pop(0) if counts else params.x.new_empty(0, dtype=torch.int32), finite)
    if counts and params.up_relu:
        stats.nnz_used = counted.pop(0)
    if layout is not None and tile:
        tiles = counted.pop(0)
        if counts and params.layout is not None:
            in_sums = finite if params.rows is None else finite & (params.rows != 0)
            stats.tiles = tile_counts(tiles, in_sums, layout)
    if neurons:
        sums = len(NEURON_SUMS)
        stats.neurons, counted = NeuronSums(*counted[:sums]), counted[sums:]
    if layout is not None and words:
        packed, *wide, spill_index, spill = counted
        d_ff, values = params.w_gate.shape[0], wide[0] if wide else None
        stats.packed = TwELL(layout, d_ff, params.x.dtype, packed, values, spill_index, spill)
    return y.view(x.shape), stats
