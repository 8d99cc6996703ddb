"""Measure what issue 33 asks of one GPU, row by row of its table: models that live, and tokens a second.

    python tests/support/living_models.py [squares] [few] [host]
    python tests/support/living_models.py --model MODEL --text TEXT layers ffn whole

MODEL: a folder that `twell train` made, best of 28 layers of 2048 × 5632; TEXT: of at least 131 072 tokens. A line a
figure as soon as it is known: what it is, × dense, at least wanted, aimed at. Everything is timed in turns beside its
baseline; the parts on a model are `twell bench`'s own.

squares: plain ReLU squared × compiled dense
few: fully dense calls of 1 and 16 rows and sparse ones, by the choices of dispatch.h for `rows16`
host: microseconds until a call returns, with checks and prepared; calls with a plan prepared too
layers, ffn: layers on their own inputs × compiled dense, by rows; all layers × dense at 131 072 rows
whole: forward passes, eager generation, steps of decoding, dense and sparse

Cost on an H100, as expected: squares 35 s, few 50 s, host 25 s; layers 50 s, ffn 40 s, whole 90 s.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import host_cost

from twell.kernels.backends import hopper
from twell.kernels.backends.gpu import Stage, results
from twell.kernels.benchmark.operations import COMPILED, DENSE, BenchRequest, operations, sibling
from twell.kernels.benchmark.runner import cache_bytes
from twell.kernels.benchmark.synthetic import synthetic_ffn
from twell.kernels.benchmark.timing import TimedCall, graphed, time_in_turns
from twell.kernels.modules import Probe, SparseFFN
from twell.kernels.params import FFNParams
from twell.workbench.bench import whole
from twell.workbench.bench.command import bench
from twell.workbench.bench.options import BenchOptions
from twell.workbench.bench.sides import LinearFFN

TURNS, CALLS, TOKENS, SECONDS = 15, 20, 32, 0.25
DEVICE, KERNEL = "cuda", "hopper"
SQUARES = ((2048, 8192), (768, 3072))
FEW = ((2048, 5632), (2048, 8192), (2560, 6912), (3072, 8192), (4096, 11_008))
CHOICES = {
    "now": 0,
    "prefetch dense": Stage.LEAVE_DENSE,
    "next wave": Stage.NEXT_WAVE,
    "both": Stage.LEAVE_DENSE | Stage.NEXT_WAVE,
    "wide groups": Stage.WIDE_GROUPS,
    "wide, prefetch dense": Stage.WIDE_GROUPS | Stage.LEAVE_DENSE,
}
LAYERS, LAYER_ROWS, ALL_ROWS = "0,1,4,14,27", "512,1024,2048,4096,8192,16384,32768,131072", "131072"
FEW_NNZ, HOST_NNZ = 29, 60
STEPS = {1: (1.35, 1.6), 8: (1.3, 1.5), 64: (1.2, 1.35)}  # by sequences: at least, aim
EAGER = {1: (1.0, 1.05), 8: (1.0, 1.05), 64: (1.15, 1.2)}
Rows = list[dict[str, Any]]


def say(what: str, ratio: float, least: float, aim: float, more: str = "") -> None:
    """Print a figure beside what is wanted of it."""
    verdict = "aim" if ratio >= aim else "holds" if ratio >= least else "SHORT"
    print(f"{what} | {ratio:.3f} | {least:g} | {aim:g} | {verdict} {more}", flush=True)


@contextmanager
def constant(module: Any, name: str, value: Any) -> Iterator[None]:
    """Have another value for a constant of a module for a while."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def repeated(run: TimedCall, times: int) -> TimedCall:
    """Return the replay of a graph of so many calls."""

    def calls() -> None:
        for _ in range(times):
            run()

    return graphed(calls, torch.device(DEVICE))


def medians(runs: dict[str, TimedCall], calls: int) -> dict[str, float]:
    """Return the median microseconds of a call, of runs of so many calls, in turns."""
    times = time_in_turns(runs, torch.device(DEVICE), TURNS)
    return {name: statistics.median(taken) / calls for name, taken in times.items()}


def squares() -> None:
    """Time plain ReLU squared, heavy-tailed."""
    for d_model, d_ff in SQUARES:
        for rows in (8192, 131_072):
            for share in (0.1, 0.03):
                made, x = synthetic_ffn(
                    "heavy", rows, d_model, d_ff, nnz=share * d_ff, dtype=torch.bfloat16, device=DEVICE, plain=True
                )
                ffn = SparseFFN(made.w_gate, None, made.w_down, activation="relu2", kernel="reference")
                calls, base = max(1, CALLS * 2048 // rows), operations(ffn, x, BenchRequest(kernels=[]), {})
                runs = {name.op: repeated(base[name], calls) for name in (DENSE, COMPILED)}
                runs["now"] = repeated(partial(sibling(ffn, "hopper"), x), calls)
                took = medians(runs, calls)
                for name in [name for name in runs if name not in (DENSE.op, COMPILED.op)]:
                    about = f"squares {d_model} × {d_ff}, {share:.0%}, {rows:,} rows, {name}"
                    least, aim = (1.0, 1.1) if share > 0.05 else (1.4, 1.7)
                    say(about, took[COMPILED.op] / took[name], least, aim, f"{took[name]:.0f} µs")
                del runs, base, ffn, made, x
                torch.cuda.empty_cache()


def turned(ffn: SparseFFN, x: Tensor, stages: int, shared: tuple[Any, ...]) -> TimedCall:
    """Return a call by the launches alone with some choices turned around. shared: workspace, y and Stats"""
    params = FFNParams(x, ffn.w_gate, ffn.w_up, ffn.w_down, probes="counts").checked()
    return partial(hopper.launch, params, slice(0, len(x)), *shared, hopper.ALL_STAGES | int(stages))


def few() -> None:
    """Time calls of few rows by each set of choices, weights cold, in one workspace and with one result."""
    for d_model, d_ff in FEW:
        for rows in (1, 16):
            for kind in ("dense", "heavy"):
                ffn, x = synthetic_ffn(kind, rows, d_model, d_ff, nnz=FEW_NNZ, dtype=torch.bfloat16, device=DEVICE)
                size = sum(t.nbytes for t in ffn.parameters())
                copies = [
                    sibling(ffn, "hopper", copy=True) for _ in range(1 + math.ceil(4 * cache_bytes(x.device) / size))
                ]
                params = FFNParams(x, ffn.w_gate, ffn.w_up, ffn.w_down)
                shared = hopper.HopperWorkspace(rows, d_ff, x.dtype, x.device), *results(params, in_full=True)
                chains: dict[str, list[TimedCall]] = {
                    name: [turned(each, x, stages, shared) for each in copies] for name, stages in CHOICES.items()
                }
                for each in [ffn, *copies]:
                    found = operations(each, x, BenchRequest(kernels=[]), {})
                    for name in (DENSE, COMPILED):
                        chains.setdefault(name.op, []).append(found[name])
                took = {}
                loops = max(1, CALLS // len(copies))
                runs = {name: repeated(partial(in_turn, chain), loops) for name, chain in chains.items()}
                for name, total in medians(runs, loops).items():
                    took[name] = total / len(chains[name])
                base = min(took.pop(DENSE.op), took.pop(COMPILED.op))
                others = ", ".join(f"{name} {base / each:.3f}" for name, each in took.items() if name != "now")
                about, more = f"few {kind}, {d_model} × {d_ff}, {rows} rows", f"{took['now']:.1f} µs; {others}"
                say(about, base / took["now"], 0.98, 1.0, more)
                del runs, chains, copies, ffn


def in_turn(chain: list[TimedCall]) -> None:
    for run in chain:
        run()


def checked(module: SparseFFN, x: Tensor) -> Tensor:
    """Run a call with its checks."""
    module._prepared.clear()
    return module(x)


def host() -> None:
    """Time calls on the host: those of few rows, and those with a plan, with checks and prepared."""
    host_cost.by_rows(9)
    for d_model, d_ff, rows, plain in ((768, 3072, 8192, True), (2048, 5632, 4096, False)):
        ffn, x = synthetic_ffn(
            "heavy", rows, d_model, d_ff, nnz=HOST_NNZ, dtype=torch.bfloat16, device=DEVICE, plain=plain
        )
        calls: dict[str, Callable[[], Any]] = {"dense": partial(LinearFFN(ffn), x)}
        y = {}
        for name, call in (("checked", checked), ("prepared", SparseFFN.__call__)):
            module = SparseFFN(ffn.w_gate, ffn.w_up, ffn.w_down, kernel="hopper", probe=Probe(probes="counts"))
            y[name] = module(x)
            calls[name] = partial(call, module, x)
        assert torch.equal(y["checked"], calls["prepared"]())
        took = {name: [host_cost.host_microseconds(call, 50) for _ in range(9)] for name, call in calls.items()}
        about = {name: f"{statistics.median(times):.0f}" for name, times in took.items()}
        print(f"host µs with a plan, {d_model} × {d_ff}, {rows:,} rows: {about}", flush=True)


def microseconds(rows: Rows) -> dict[tuple[int, int, str], float]:
    """Return microseconds by rows, layer and operation."""
    return {
        (row["rows"], row["layer"], row["op"]): row["value"]
        for row in rows
        if row["metric"] == "microseconds" and ("sparse" in row["op"] or row["kernel"] == "torch")
    }


def layers(model: str, text: str) -> None:
    """Time some layers on their own inputs."""
    asked: dict[str, Any] = {"inputs": "text", "kernel": (KERNEL,), "seconds": SECONDS}
    found = bench(BenchOptions(model=model, text=(text,), layers=LAYERS, rows=LAYER_ROWS, **asked))
    took, nnz = microseconds(found), {(row["rows"], row["layer"]): row["nnz_mean"] for row in found}
    for rows, layer in nnz:
        ratio = took[rows, layer, "ffn_compiled"] / took[rows, layer, "ffn_sparse"]
        say(f"layer {layer}, {rows:,} rows, × compiled", ratio, 1.0, 1.05, f"nnz {nnz[rows, layer]:.0f}")


def ffn(model: str, text: str) -> None:
    """Time all layers at 131 072 rows."""
    asked: dict[str, Any] = {"inputs": "text", "kernel": (KERNEL,), "seconds": SECONDS, "compile": False}
    took = microseconds(bench(BenchOptions(model=model, text=(text,), rows=ALL_ROWS, **asked)))
    dense, sparse, gate = (
        sum(time for (_, _, of), time in took.items() if of == op) for op in ("ffn_dense", "ffn_sparse", "gate")
    )
    say("FFN of all layers, 131,072 rows", dense / sparse, 2.65, 2.8, f"gate alone {dense / gate:.2f}")


def whole_model(model: str, text: str) -> None:
    """Time passes, generation and steps."""
    with constant(whole, "TOKENS", {"cuda": TOKENS}):
        found = bench(BenchOptions(model=model, text=(text,), whole=True))
    took = {(row["input"], row["rows"], row["op"]): row["value"] for row in found if row["metric"] == "microseconds"}
    nnz = statistics.mean(row["nnz_mean"] for row in found if row["input"] == "text")
    for (kind, rows, op), time_of_it in took.items():
        if "sparse" not in op:
            continue
        ratio = took[kind, rows, op.replace("sparse", "dense")] / time_of_it
        least, aim = 1.0, 1.0
        if op.startswith("whole") and op.endswith("compiled"):
            least, aim = 1.47, 1.5
        elif op.startswith("step"):
            least, aim = STEPS[rows]
        elif op == "generate_sparse":
            least, aim = EAGER[rows]
        say(f"{op.replace('_sparse', '')}, {kind}, {rows:,}", ratio, least, aim, f"nnz {nnz:.0f}")


ALONE: dict[str, Callable[[], None]] = {"squares": squares, "few": few, "host": host}
ON_MODEL: dict[str, Callable[[str, str], None]] = {"layers": layers, "ffn": ffn, "whole": whole_model}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="+", choices=[*ALONE, *ON_MODEL])
    parser.add_argument("--model")
    parser.add_argument("--text")
    options = parser.parse_args()
    if options.parts and ON_MODEL.keys() & {*options.parts} and not (options.model and options.text):
        parser.error(f"expected --model and --text for {', '.join(ON_MODEL)}: give both")
    print(f"{torch.cuda.get_device_name()}; what | × dense | at least | aim | verdict", flush=True)
    for part in options.parts:
        began = time.perf_counter()
        with torch.inference_mode():
            ALONE[part]() if part in ALONE else ON_MODEL[part](options.model, options.text)
        torch.cuda.empty_cache()
        print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
