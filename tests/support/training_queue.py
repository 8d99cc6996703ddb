"""Measure training steps of one FFN in a queue that is never empty, dense beside ours, and the memory of a step.

    python tests/support/training_queue.py [ROWS [NNZ ...]]

ROWS: default 16 384, of 2048 × 5632 in bfloat16; NNZ: mean firings of a row, default those below. For each of them a
line a way: the median over TURNS of a step's time, of STEPS that are launched without a wait, the ways in turns; how
many times as fast as dense eager and dense compiled, with the least and the most of the turns; the memory beyond what
was in use, in GiB, and what of it the step keeps for its backward pass; and of ours, what was kept.

`default`: told no capacity; `capacity_for`: as `twell train` calls it; `nothing kept`: gate and up are made again where
much fires. Cost: two minutes of one H200, most of it compiling.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.gpu_training import what_fits
from support.training_cost import D_FF, Step, made, peak_gib, sparse_forward

from twell.kernels.backends import hopper_compact
from twell.kernels.benchmark.training import dense_forward, step
from twell.kernels.training import capacity_for

NNZ, STEPS, TURNS, WARM = (D_FF, D_FF // 2, 1126, 938, 600), 20, 11, 3
KEPT = {-2: "g and h", -1: "x, all at once", 0: "x, in passes", 1: "values"}
Forward = Callable[..., tuple[Tensor, Tensor]]


def call_of(rows: int, nnz: float) -> list[Tensor]:
    """Return x and weights that fire so many neurons a row in the mean."""
    if nnz < D_FF:
        return made(rows, nnz)[1]
    x, gate, *others = made(rows, D_FF / 2)[1]
    return [x.abs(), gate.abs(), *others]


def milliseconds(run: Step) -> float:
    """Return the time of a step among STEPS of them."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    begin.record()
    for _ in range(STEPS):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / STEPS


def kept_gib(forward: Forward, tensors: list[Tensor]) -> float:
    """Return the memory that a forward pass leaves in use, in GiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    results = forward(*tensors)
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    del results
    return (after - before) / 2**30


def way_of(capacity: int | None, tensors: list[Tensor], dy: Tensor) -> str:
    """Return what a call of ours kept."""
    with what_fits() as fits:
        step(partial(sparse_forward, False, True, True, capacity), tensors, dy)
    return KEPT[fits[0]]


def report(rows: int, nnz: float) -> None:
    """Print a line for each way of a call."""
    given = call_of(rows, nnz)
    tensors = [t.detach().contiguous().requires_grad_() for t in given]
    with torch.no_grad():
        mean = float((tensors[0] @ tensors[1].t() > 0).sum()) / rows
    hopper_compact.ENABLED = hopper_compact.AT_ONCE = True
    capacities = {"default": None, "capacity_for": capacity_for(mean, D_FF), "nothing kept": 1}
    forwards: dict[str, Forward] = {
        "dense eager": partial(dense_forward, "relu"),
        "dense compiled": torch.compile(partial(dense_forward, "relu"), dynamic=False),
    }
    forwards |= {name: partial(sparse_forward, True, True, True, many) for name, many in capacities.items()}
    dy = torch.randn_like(tensors[0])
    runs = {name: partial(step, forward, tensors, dy) for name, forward in forwards.items()}
    for run in runs.values():
        for _ in range(WARM):
            run()
    peaks = {name: (kept_gib(forwards[name], tensors), peak_gib(run)) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            times[name].append(milliseconds(run))
    for name, taken in times.items():
        gains = []
        for dense in ("dense eager", "dense compiled"):
            each = [other / one for one, other in zip(taken, times[dense], strict=True)]
            gains.append(f"{statistics.median(each):.3f} ({min(each):.3f} - {max(each):.3f})")
        kept = f"; kept: {way_of(capacities[name], tensors, dy)}" if name in capacities else ""
        about = f"told {capacities[name]}" if capacities.get(name) else ""
        print(
            f"nnz {mean:6.1f} | {name:14} {about:9} | {statistics.median(taken):.3f} ms | x eager {gains[0]} | "
            f"x compiled {gains[1]} | keeps {peaks[name][0]:.3f}, peak {peaks[name][1]:.3f} GiB{kept}",
            flush=True,
        )


if __name__ == "__main__":
    torch.compiler.reset()
    print(torch.cuda.get_device_name(), torch.__version__)
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384
    for wanted in [float(word) for word in sys.argv[2:]] or NNZ:
        report(many, wanted)
