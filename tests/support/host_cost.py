"""Time a call of an FFN on the host: the sparse one, checked and prepared, beside the dense one's modules.

    python tests/support/host_cost.py [--rounds 9]

Microseconds until a call returns, medians of rounds of 100 calls in turns, counts on, 2048 x 5632 in bf16, not graphed.
The GPU takes less time than the host at these rows, so it never holds the host up. Then 20 calls in a row, compiled by
torch.compile(fullgraph=True, mode="reduce-overhead"), which replays them: microseconds of the GPU.
Cost: half a minute, most of it compiling.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from twell.kernels.benchmark.synthetic import synthetic_ffn
from twell.kernels.benchmark.timing import time_in_turns
from twell.kernels.modules import Probe, SparseFFN
from twell.workbench.bench.sides import LinearFFN

CALLS, D_MODEL, D_FF = 100, 2048, 5632


def host_microseconds(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Return microseconds a call that the host takes, over so many of them."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return took / calls * 1e6


def checked(module: SparseFFN, x: torch.Tensor) -> None:
    """Call a module as if for the first time with this shape, less the preparing."""
    module._run(module._params(x))


def by_rows(rounds: int) -> dict[int, tuple[SparseFFN, LinearFFN, torch.Tensor]]:
    """Time calls of few rows on the host; return both modules and the input by rows."""
    print("rows | host us: dense modules, dense calls, sparse checked, sparse prepared | x modules, x calls")
    modules = {}
    for rows in (1, 8, 64):
        ffn, x = synthetic_ffn("heavy", rows, D_MODEL, D_FF, nnz=60, dtype=torch.bfloat16, device="cuda")
        sparse = SparseFFN(ffn.w_gate, ffn.w_up, ffn.w_down, probe=Probe(probes="counts"))
        dense = LinearFFN(ffn)
        modules[rows] = sparse, dense, x
        calls = {
            "modules": partial(dense, x),
            "calls": partial(ffn.dense, x),
            "checked": partial(checked, sparse, x),
            "prepared": partial(sparse, x),
        }
        times: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 1):
            for name in sorted(calls, key=lambda name, turn=turn: hash((name, turn))):
                took = host_microseconds(calls[name])
                if turn:
                    times[name].append(took)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        ratios = medians["modules"] / medians["prepared"], medians["calls"] / medians["prepared"]
        print(rows, "|", *(f"{m:.1f}" for m in medians.values()), "|", *(f"{r:.3f}" for r in ratios), flush=True)
    return modules


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    modules = by_rows(parser.parse_args().rounds)
    print("rows | reduce-overhead, GPU us: dense, sparse (20 layers chained) | x dense, largest difference")
    for rows, (sparse, dense, x) in modules.items():
        torch.compiler.reset()
        chains, outputs = {}, {}
        for name, module in (("dense", dense), ("sparse", sparse)):

            def chain(x: torch.Tensor, module: torch.nn.Module = module) -> torch.Tensor:
                for _ in range(20):
                    x = x + 1e-3 * module(x)
                return x

            compiled = torch.compile(chain, fullgraph=True, mode="reduce-overhead")
            for _ in range(3):
                torch.compiler.cudagraph_mark_step_begin()
                outputs[name] = compiled(x).clone()
            chains[name] = partial(compiled, x)
        times = time_in_turns(chains, x.device, 15)
        medians = {name: statistics.median(taken) for name, taken in times.items()}
        apart = (outputs["dense"].float() - outputs["sparse"].float()).abs().max()
        line = (
            f"{medians['dense']:.1f} {medians['sparse']:.1f} | {medians['dense'] / medians['sparse']:.3f} {apart:.4f}"
        )
        print(rows, "|", line, flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
