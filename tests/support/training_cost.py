"""Measure a training step of one FFN on a GPU by each way from Python to the launches, beside dense autograd.

    python tests/support/training_cost.py [ROWS [PATTERNS]]

ROWS: default 16 384, of 2048 × 5632 in bfloat16. For each mean nnz in NNZ, or each layer of PATTERNS, all in turns:
`step`, forward and backward with the L1 term, each waited for, in ms; `host`, until forward and backward have returned,
in µs, on a GPU that has nothing else to do; `peak`, memory beyond what was in use, in GiB. Whether the gradients of
both ways are the same bits. Cost: a minute of one H200.

`compact`: in the workspace of `hopper_compact`, by whole ops, with the capacity of `capacity_for`, as a trainer calls
it; `overflow`: likewise, but with room for one value a row, so that all gradients are computed densely, in passes; `at
once`: each value once; how far their gradients are from those of `whole`.

PATTERNS: recorded neurons that fire, as `twell bench --patterns` reads them; more rows repeat the first. An x that
fires them by random weights is found by `fired_patterns.py`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.fired_patterns import fired_by, patterns
from support.gpu_training import errors, what_fits

from twell.kernels.backends import hopper_compact
from twell.kernels.benchmark.synthetic import synthetic_ffn
from twell.kernels.benchmark.training import dense_forward, step
from twell.kernels.calls import whole_calls
from twell.kernels.training import capacity_for, choose, train_gated_ffn

D_MODEL, D_FF, NNZ, TURNS = 2048, 5632, (6.9, 18, 43, 69, 331, 2816), 20  # half of them: of random weights
Step = Callable[[], list[Tensor]]


def sparse_forward(
    whole: bool, compact: bool, at_once: bool, capacity: int | None, *tensors: Tensor
) -> tuple[Tensor, Tensor]:
    """Return y and l1. whole: by whole ops; compact, at_once: `hopper_compact`'s switches, until the next step"""
    whole_calls.ENABLED, hopper_compact.ENABLED, hopper_compact.AT_ONCE = whole, compact, at_once
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


def made(rows: int, nnz: float) -> tuple[float, list[Tensor]]:
    """Return the mean nnz, x and weights of made-up inputs."""
    if 2 * nnz == D_FF:
        x, gate, up = (torch.randn(many, D_MODEL, device="cuda") for many in (rows, D_FF, D_FF))
        down = torch.randn(D_MODEL, D_FF, device="cuda") * D_FF**-0.5
        return nnz, [x.bfloat16(), *((w * D_MODEL**-0.5).bfloat16() for w in (gate, up)), down.bfloat16()]
    ffn, x = synthetic_ffn("heavy", rows, D_MODEL, D_FF, nnz=nnz, dtype=torch.bfloat16, device="cuda")
    assert ffn.w_up is not None
    return nnz, [x, ffn.w_gate, ffn.w_up, ffn.w_down]


def recorded(rows: int, pattern: Tensor) -> tuple[float, list[Tensor]]:
    """Return the mean nnz, x and weights that fire a pattern [n, d_ff], repeated to so many rows."""
    x, gate = fired_by(pattern, D_MODEL)
    fired = x @ gate.t() > 0
    print(f"{int((fired != pattern).sum())} of {int(pattern.sum())} firings differ from what was recorded")
    up = (torch.randn_like(gate.float()) * D_MODEL**-0.5).bfloat16()
    down = (torch.randn_like(gate.float()).t() * D_FF**-0.5).bfloat16()
    return float(fired.sum()) / len(x), [x.repeat(-(-rows // len(x)), 1)[:rows], gate, up, down]


def report(nnz: float, given: list[Tensor]) -> None:
    """Print a line for each way of a call. given: x and weights; nnz: the mean of its rows"""
    nnz, x = round(nnz, 1), given[0]
    tensors = [t.detach().contiguous().requires_grad_() for t in given]
    capacities = []
    for hopper_compact.ENABLED in (False, True):
        capacities.append(capacity_for(nnz, D_FF))
    capacity, own = capacities
    forwards = {
        "dense": partial(dense_forward, "relu"),
        "traced": partial(sparse_forward, False, False, False, capacity),
        "whole": partial(sparse_forward, True, False, False, capacity),
        "compact, traced": partial(sparse_forward, False, True, False, own),
        "compact": partial(sparse_forward, True, True, True, own),
        "overflow": partial(sparse_forward, True, True, False, 1),
        "at once": partial(sparse_forward, True, True, True, 1),
    }
    dy = torch.randn_like(x)
    runs = {name: partial(step, forward, tensors, dy) for name, forward in forwards.items()}
    peaks = {name: (run(), peak_gib(run))[1] for name, run in runs.items()}
    want = runs["whole"]()
    same = all(torch.equal(a, b) for a, b in zip(runs["traced"](), want, strict=True))
    with what_fits() as fits:
        runs["compact, traced"]()
    off = {
        name: max(errors(a, b)[0] for a, b in zip(runs[name](), want, strict=True))
        for name in ("compact", "overflow", "at once")
    }
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
    print(f"nnz {nnz}, capacity {capacity}: same gradients both ways: {same}")
    ways = ", ".join(f"{name} off by {many:.4f}" for name, many in off.items())
    print(f"nnz {nnz}, compact capacity {own}: fits: {fits}; gradients: {ways}", flush=True)


if __name__ == "__main__":
    many = int(sys.argv[1]) if len(sys.argv) > 1 else 16_384
    print(choose("cuda", torch.bfloat16, D_MODEL, D_FF, many).reason)
    if len(sys.argv) > 2:
        for pattern in patterns(Path(sys.argv[2]), D_FF):
            report(*recorded(many, pattern))
    else:
        for mean in NNZ:
            report(*made(many, mean))
