"""The FFN op timed beside its dense baselines, in turns.

The idea: whatever is to be compared runs in one process on the same input, one operation after another and then all of
them again, so that clocks, heat and whoever else uses the machine meet all of them alike. A figure is the median of its
turns; the least and the greatest stand beside it. Baselines are the dense FFN, the same compiled, and the same with
gate and up as one product. A call of few rows is bound by reading weights, so these can be rotated through more than
the cache holds (cold); on a GPU, calls that take less time than their launches are replayed from a graph.

Cost: compiling the dense FFN, some seconds a shape; then the time given, and one product in float64 on some rows.

    ffn, x = synthetic_ffn("heavy", 8192, 2048, 5632, nnz=29, dtype=torch.bfloat16, device="cuda")
    result = bench(ffn, x)
    result.median(DENSE) / result.median(Operation("ffn_sparse", "hopper", 8))
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from twell.kernels.backends.reference import Linear
from twell.kernels.benchmark.operations import (
    COMPILED,
    DENSE,
    FUSED,
    UP_DOWN,
    BenchRequest,
    Operation,
    candidates,
    dense_operations,
    operations,
    refusal,
    sibling,
    stages,
)
from twell.kernels.benchmark.timing import Run, graphed, time_in_turns
from twell.kernels.layout import Layout, TwELL, tile_view, unpack
from twell.kernels.modules import SparseFFN

LEAST, MOST = 5, 30  # turns
SECONDS = {"cpu": 0.3, "cuda": 1.0}  # of turns, unless asked otherwise
GRAPH_ROWS = 4096  # calls of up to so many rows on a GPU are replayed from a graph
CALLS = 20  # in a graph, at least, so that what starts it does not count
CACHES, MOST_SETS = 4, 64  # cold: the weights in turn come to so many times the cache, within reason
CACHE = 2**25  # bytes, where the machine does not say
EXACT_ROWS = {"cpu": 128, "cuda": 1024}  # rows whose error is found
CHUNK = {"cpu": 2**22, "cuda": 2**27}  # elements of a gate product at a time, when counting
WHOLE = (DENSE.op, COMPILED.op, FUSED.op, "ffn_sparse")  # operations whose y is held to float64
EVERYTHING = BenchRequest()


@dataclass(frozen=True)
class FiringCounts:
    """What the rows of a case fire. union: neurons fired by any row; past: by compression, rows that overflow."""

    nnz_mean: float
    union: int
    past: dict[int, int]


@dataclass(frozen=True)
class Result:
    """What was found. took: microseconds of a call, turn by turn; errors: relative, mean and largest over rows;
    left_out: why an operation or a kernel is not there; replayed: those whose calls came from a CUDA graph.
    """

    took: dict[Operation, list[float]]
    errors: dict[Operation, tuple[float, float]]
    fired: FiringCounts
    replayed: set[Operation]
    left_out: dict[str, str]

    def median(self, operation: Operation) -> float:
        """Microseconds of a call."""
        return statistics.median(self.took[operation])


@torch.inference_mode()
def bench(ffn: SparseFFN, x: Tensor, asked: BenchRequest = EVERYTHING) -> Result:
    """Times an FFN on x [rows, d_model], with its baselines and the kernels that can take it."""
    left_out: dict[str, str] = {}
    sets = [operations(each, x, asked, left_out) for each in _weight_sets(ffn, asked.cold)]
    if COMPILED in sets[0]:
        try:
            sets[0][COMPILED]()
        except Exception as error:  # no compiler, say: what is raised is whatever torch's compiler met
            left_out["ffn_compiled"] = str(error).strip().splitlines()[0]
            for each in sets:
                del each[COMPILED]
    rows = sample(x)
    wide = sibling(ffn, "reference", torch.float64).dense(x[rows].double())
    errors = {key: relative(run()[rows], wide) for key, run in sets[0].items() if key.op in WHOLE}
    took, replayed = side_by_side(sets, x, asked)
    return Result(took, errors, fired(ffn, x, asked.layouts), replayed, left_out)


@torch.inference_mode()
def bench_packed(ffn: SparseFFN, x: Tensor, packed: TwELL, asked: BenchRequest = EVERYTHING) -> Result:
    """Times up and down alone, on gate values that are given: those of `packed`, whatever x makes the gate emit.

    Kernels whose stages cannot be run alone are left out. The dense FFN and the gate product run beside them, on x.
    """
    gate, up, down = unpack(packed), ffn.w_up, ffn.w_down.contiguous()
    left_out: dict[str, str] = {}
    runs = dense_operations(sibling(ffn, "reference"), x)
    runs.pop(FUSED, None)
    runs[UP_DOWN] = lambda: linear(gate if up is None else gate * linear(x, up, ffn.b_up), down, ffn.b_down)
    for name in candidates(ffn, x, asked, left_out):
        reason = refusal(name, ffn, x, packed.layout)
        module = ffn if reason else sibling(ffn, name)
        given = {} if reason else stages(name, module, x, packed)
        if not given:
            left_out[name] = reason or "what follows its gate product cannot be run alone"
            continue
        for op, run in (stages(name, module, x) | given).items():  # the gate product leaves its own in another place
            runs[Operation(op, name, packed.layout.compression)] = run
    rows = sample(x)
    hidden = gate[rows].double()
    if up is not None:
        hidden = hidden * linear(x[rows].double(), up.double(), _double(ffn.b_up))
    wide = linear(hidden, down.double(), _double(ffn.b_down))
    errors = {key: relative(run()[rows], wide) for key, run in runs.items() if key.op == UP_DOWN.op}
    took, replayed = side_by_side([runs], x, asked)
    counts, compression = packed.counts, packed.layout.compression
    past = {compression: int((counts > packed.layout.slots).any(1).sum())}
    union = int(sum((some != 0).any(0).long() for some in gate.split(2**14)).count_nonzero())  # type: ignore[union-attr]
    return Result(took, errors, FiringCounts(float(counts.sum()) / len(x), union, past), replayed, left_out)


def _weight_sets(ffn: SparseFFN, cold: bool) -> list[SparseFFN]:
    """The FFN, and if cold as many copies as keep each other out of the cache."""
    if not cold:
        return [ffn]
    size = sum(t.nbytes for t in ffn.parameters())
    number = min(MOST_SETS, math.ceil(CACHES * cache(ffn.w_gate.device) / size) + 1)
    return [ffn, *(sibling(ffn, "reference", copy=True) for _ in range(number - 1))]


def cache(device: torch.device) -> int:
    """Bytes of the last cache before memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    names = getattr(os, "sysconf_names", {})
    size = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in names else 0
    return size if size > 0 else CACHE  # 0 or -1 where it is not known


def side_by_side(
    sets: Sequence[dict[Operation, Run]], x: Tensor, asked: BenchRequest
) -> tuple[dict[Operation, list[float]], set[Operation]]:
    """Microseconds of each operation's call, turn by turn, and those that came from a graph."""
    graph = x.device.type == "cuda" and len(x) <= GRAPH_ROWS
    loops = math.ceil(CALLS / len(sets)) if graph else 1
    calls = loops * len(sets)
    runs: dict[Operation, Run] = {key: partial(_all, [one[key] for one in sets] * loops) for key in sets[0]}
    replayed = {key for key in runs if graph and key.op != "ffn_packed"}  # packing waits for the host
    runs |= {key: graphed(runs[key], x.device) for key in replayed}
    once = sum(sum(times) for times in time_in_turns(runs, x.device, 1).values())
    repeats = max(LEAST, min(MOST, int((asked.seconds or SECONDS[x.device.type]) * 1e6 / once)))
    took = time_in_turns(runs, x.device, repeats)
    if asked.on_timed is not None:
        for key, run in runs.items():
            asked.on_timed(key, run)
    return {key: [time / calls for time in times] for key, times in took.items()}, replayed


def _all(runs: Iterable[Run]) -> None:
    for run in runs:
        run()


def fired(ffn: SparseFFN, x: Tensor, layouts: Sequence[Layout]) -> FiringCounts:
    """Counts what x fires, from the gate product in float32."""
    gate = Linear(ffn.w_gate, ffn.b_gate)
    union = torch.zeros(ffn.d_ff, dtype=torch.bool, device=x.device)
    total, past = 0, {layout.compression: 0 for layout in layouts}
    for some in x.split(max(1, CHUNK[x.device.type] // ffn.d_ff)):
        marks = gate(some) > 0
        union |= marks.any(0)
        total += int(marks.sum())
        for layout in layouts:
            past[layout.compression] += int((tile_view(marks, layout).sum(-1) > layout.slots).any(1).sum())
    return FiringCounts(total / len(x), int(union.sum()), past)


def sample(x: Tensor) -> slice:
    """Rows all over x, as many as EXACT_ROWS allows."""
    return slice(None, None, math.ceil(len(x) / EXACT_ROWS[x.device.type]))


def relative(y: Tensor, wide: Tensor) -> tuple[float, float]:
    """Mean and largest of |y - wide| / |wide| over rows; 0 in rows where both are 0."""
    size, off = wide.norm(dim=1), (y.double() - wide).norm(dim=1)
    error = torch.where((size == 0) & (off == 0), 0, off / size)
    return float(error.mean()), float(error.max())


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()
