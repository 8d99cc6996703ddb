"""Measure a training step of one FFN on a GPU by both ways from Python to the launches, beside dense autograd.

    python tests/support/training_cost.py [ROWS]

ROWS: default 16 384, of 2048 × 5632 in bfloat16. For each mean nnz in NNZ, all in turns: `step`, forward and backward
with the L1 term, each waited for, in ms; `host`, until forward and backward have returned, in µs, on a GPU that has
nothing else to do; `peak`, memory beyond what was in use, in GiB. Whether the gradients of both ways are the same bits.
Cost: a minute of one H200.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from twell.kernels import whole_calls
from twell.kernels.benchmark.synthetic import synthetic_ffn
from twell.kernels.benchmark.training import dense_forward, step
from twell.kernels.training import capacity_for, choose, train_gated_ffn

D_MODEL, D_FF, NNZ, TURNS = 2048, 5632, (6.9, 18, 43, 69, 331), 20
Step = Callable[[], list[Tensor]]


def sparse_forward(whole: bool, capacity: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Return y and l1. whole: by whole ops"""
    whole_calls.ENABLED = whole
    out = train_gated_ffn(*tensors, kernel="hopper", capacity=capacity)  # type: ignore[arg-type]
    return out.y, out.l1


def timed(run: Step) -> tuple[float, float]:
    """Return the microseconds until a step has returned, and until the GPU is done."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    returned = time.perf_counter()
    torch.cuda.synchronize()
    return 1e6 * (returned - began), 1e6 * (time.perf_counter() - began)


def peak_gib(run: Step) -> float:
    """Return the memory that a step needs beyond what is in use, in GiB."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def report(rows: int, nnz: float) -> None:
    """Print a line for one mean nnz."""
    ffn, x = synthetic_ffn("heavy", rows, D_MODEL, D_FF, nnz=nnz, dtype=torch.bfloat16, device="cuda")
    assert ffn.w_up is not None
    tensors = [t.detach().contiguous().requires_grad_() for t in (x, ffn.w_gate, ffn.w_up, ffn.w_down)]
    capacity = capacity_for(nnz, D_FF)
    forwards = {
        "dense": partial(dense_forward, "relu"),
        "traced": partial(sparse_forward, False, capacity),
        "whole": partial(sparse_forward, True, capacity),
    }
    dy = torch.randn_like(x)
    runs = {name: partial(step, forward, tensors, dy) for name, forward in forwards.items()}
    peaks = {name: (run(), peak_gib(run))[1] for name, run in runs.items()}
    same = all(torch.equal(a, b) for a, b in zip(runs["traced"](), runs["whole"](), strict=True))
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            times[name].append(timed(run))
    medians = {
        name: [statistics.median(column) for column in zip(*taken, strict=True)] for name, taken in times.items()
    }
    for name, (host, took) in medians.items():
        gain = f"{medians['dense'][1] / took:.2f} x dense"
        print(f"nnz {nnz}, {name}: {took / 1e3:.3f} ms, {gain}; host {host:.0f} us; peak {peaks[name]:.2f} GiB")
    print(f"nnz {nnz}, capacity {capacity}: same gradients both ways: {same}", flush=True)


if __name__ == "__main__":
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384
    print(choose("cuda", torch.bfloat16, D_MODEL, D_FF, many).reason)
    for mean in NNZ:
        report(many, mean)
