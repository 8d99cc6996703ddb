"""Time the FFN op and its dense baselines in turns.

The idea: all operations that are compared run in one process on the same input, one after another and then all of them
again, so that clocks, heat and other users of the machine affect all of them alike. A figure is the median of its
turns, with the least and the greatest. Baselines are the dense FFN, the same compiled, and the same with gate and up as
one product. The time of a call of few rows goes into reading weights, so these can be rotated through more than the
cache holds (cold). On a GPU, calls that take less time than their launches are replayed from a graph.

Cost: compiling the dense FFN, some seconds a shape; then the requested time, and one product in float64 on a sample of
rows.

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
from twell.kernels.benchmark.timing import SECONDS, TimedCall, graphed, time_in_turns
from twell.kernels.layout import Layout, TwELL, tile_view, unpack
from twell.kernels.modules import SparseFFN

MIN_TURNS, MAX_TURNS = 5, 30
GRAPH_ROWS = 4096  # calls of up to this many rows on a GPU are replayed from a graph
CALLS = 20  # fewest calls in a graph, so that the time to start it does not count
CACHES, MAX_SETS = 4, 64  # cold: sets of weights that together have this many times the cache's size; most sets
CACHE = 2**25  # bytes; the size of the cache where the machine does not report it
EXACT_ROWS = {"cpu": 128, "cuda": 1024}  # rows whose error is measured
CHUNK = {"cpu": 2**22, "cuda": 2**27}  # elements of the gate product that are computed at a time to count firings
WITH_OUTPUT = (DENSE.op, COMPILED.op, FUSED.op, "ffn_sparse")  # operations whose y is compared with float64
EVERYTHING = BenchRequest()


@dataclass(frozen=True)
class FiringCounts:
    """The firings in a case. nnz_mean: neurons a row; union: neurons fired by any row; overflowing: by compression, how
    many rows overflow a tile."""

    nnz_mean: float
    union: int
    overflowing: dict[int, int]


@dataclass(frozen=True)
class Result:
    """The result of a benchmark.

    times: microseconds of a call in each turn; errors: relative to float64, mean and largest over rows; fired: the
    firings in the case; replayed: operations whose calls were replayed from a CUDA graph; left_out: the reason for each
    operation or kernel that was not timed
    """

    times: dict[Operation, list[float]]
    errors: dict[Operation, tuple[float, float]]
    fired: FiringCounts
    replayed: set[Operation]
    left_out: dict[str, str]

    def median(self, operation: Operation) -> float:
        """Return the median time of a call in microseconds."""
        return statistics.median(self.times[operation])


@torch.inference_mode()
def bench(ffn: SparseFFN, x: Tensor, request: BenchRequest = EVERYTHING) -> Result:
    """Time an FFN on x [rows, d_model]: its dense baselines, and each kernel that can take it."""
    left_out: dict[str, str] = {}
    sets = [operations(each, x, request, left_out) for each in _weight_sets(ffn, request.cold)]
    if COMPILED in sets[0]:
        try:
            sets[0][COMPILED]()
        except Exception as error:  # such as a missing compiler; torch's compiler may raise any kind of error
            left_out["ffn_compiled"] = str(error).strip().splitlines()[0]
            for each in sets:
                del each[COMPILED]
    rows = sample(x)
    expected = sibling(ffn, "reference", torch.float64).dense(x[rows].double())
    errors = {key: relative(run()[rows], expected) for key, run in sets[0].items() if key.op in WITH_OUTPUT}
    times, replayed = side_by_side(sets, x, request)
    return Result(times, errors, fired(ffn, x, request.layouts), replayed, left_out)


@torch.inference_mode()
def bench_packed(ffn: SparseFFN, x: Tensor, packed: TwELL, request: BenchRequest = EVERYTHING) -> Result:
    """Time up and down alone on the gate values of `packed`, which need not be those that x gives.

    Kernels whose stages cannot be run alone are left out. The dense FFN and the gate product are timed too, on x.
    """
    gate, up, down = unpack(packed), ffn.w_up, ffn.w_down.contiguous()
    left_out: dict[str, str] = {}
    runs = dense_operations(sibling(ffn, "reference"), x)
    runs.pop(FUSED, None)
    runs[UP_DOWN] = lambda: linear(gate if up is None else gate * linear(x, up, ffn.b_up), down, ffn.b_down)
    for name in candidates(ffn, x, request, left_out):
        reason = refusal(name, ffn, x, packed.layout)
        module = ffn if reason else sibling(ffn, name)
        following = {} if reason else stages(name, module, x, packed)
        if not following:
            left_out[name] = reason or "what follows its gate product cannot be run alone"
            continue
        for op, run in (stages(name, module, x) | following).items():  # the gate product writes to another workspace
            runs[Operation(op, name, packed.layout.compression)] = run
    rows = sample(x)
    hidden = gate[rows].double()
    if up is not None:
        hidden = hidden * linear(x[rows].double(), up.double(), _double(ffn.b_up))
    expected = linear(hidden, down.double(), _double(ffn.b_down))
    errors = {key: relative(run()[rows], expected) for key, run in runs.items() if key.op == UP_DOWN.op}
    times, replayed = side_by_side([runs], x, request)
    counts, compression = packed.counts, packed.layout.compression
    overflowing = {compression: int((counts > packed.layout.slots).any(1).sum())}
    union = int(sum((chunk != 0).any(0).long() for chunk in gate.split(2**14)).count_nonzero())  # type: ignore[union-attr]
    return Result(times, errors, FiringCounts(float(counts.sum()) / len(x), union, overflowing), replayed, left_out)


def _weight_sets(ffn: SparseFFN, cold: bool) -> list[SparseFFN]:
    """Return the FFN and, if cold, so many copies that each has left the cache before it is used again."""
    if not cold:
        return [ffn]
    size = sum(t.nbytes for t in ffn.parameters())
    number = min(MAX_SETS, math.ceil(CACHES * cache_bytes(ffn.w_gate.device) / size) + 1)
    return [ffn, *(sibling(ffn, "reference", copy=True) for _ in range(number - 1))]


def cache_bytes(device: torch.device) -> int:
    """Return the size in bytes of the last cache before memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    names = getattr(os, "sysconf_names", {})
    size = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in names else 0
    return size if size > 0 else CACHE  # 0 or -1 where it is not known


def side_by_side(
    sets: Sequence[dict[Operation, TimedCall]], x: Tensor, request: BenchRequest
) -> tuple[dict[Operation, list[float]], set[Operation]]:
    """Return microseconds of a call of each operation in each turn, and the operations that were replayed from a graph.

    sets: the operations by name, once for each set of weights
    """
    graph = x.device.type == "cuda" and len(x) <= GRAPH_ROWS
    loops = math.ceil(CALLS / len(sets)) if graph else 1
    calls = loops * len(sets)
    runs: dict[Operation, TimedCall] = {
        key: partial(_all, [runs_of_set[key] for runs_of_set in sets] * loops) for key in sets[0]
    }
    replayed = {key for key in runs if graph and key.op != "ffn_packed"}  # packing waits for the host
    runs |= {key: graphed(runs[key], x.device) for key in replayed}
    first_turn = sum(sum(times) for times in time_in_turns(runs, x.device, 1).values())
    repeats = max(MIN_TURNS, min(MAX_TURNS, int((request.seconds or SECONDS[x.device.type]) * 1e6 / first_turn)))
    turn_times = time_in_turns(runs, x.device, repeats)
    if request.on_timed is not None:
        for key, run in runs.items():
            request.on_timed(key, run)
    return {key: [time / calls for time in times] for key, times in turn_times.items()}, replayed


def _all(runs: Iterable[TimedCall]) -> None:
    for run in runs:
        run()


def fired(ffn: SparseFFN, x: Tensor, layouts: Sequence[Layout]) -> FiringCounts:
    """Count the firings of x [rows, d_model], from the gate product in float32."""
    gate = Linear(ffn.w_gate, ffn.b_gate)
    union = torch.zeros(ffn.d_ff, dtype=torch.bool, device=x.device)
    total, overflowing = 0, {layout.compression: 0 for layout in layouts}
    for chunk in x.split(max(1, CHUNK[x.device.type] // ffn.d_ff)):
        marks = gate(chunk) > 0
        union |= marks.any(0)
        total += int(marks.sum())
        for layout in layouts:
            overflowing[layout.compression] += int((tile_view(marks, layout).sum(-1) > layout.slots).any(1).sum())
    return FiringCounts(total / len(x), int(union.sum()), overflowing)


def sample(x: Tensor) -> slice:
    """Return a slice of evenly spaced rows of x, at most EXACT_ROWS of them."""
    return slice(None, None, math.ceil(len(x) / EXACT_ROWS[x.device.type]))


def relative(y: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the mean and the largest of |y - expected| / |expected| over rows; 0 in rows where both are 0."""
    size, difference = expected.norm(dim=1), (y.double() - expected).norm(dim=1)
    error = torch.where((size == 0) & (difference == 0), 0, difference / size)
    return float(error.mean()), float(error.max())


def _double(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.double()
