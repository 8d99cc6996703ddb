"""Measure the models of the studies, one after another, with nothing beside them; `run.py` calls it.

    python data/studies/speed.py captures --work W --text valid.txt.zst     # runs, with timings
    python data/studies/speed.py steps --work W                             # a training step, dense and sparse
    python data/studies/speed.py processor --work W --text valid.txt.zst    # short captures on the CPU
    python data/studies/speed.py build                                      # compile the kernels

A model that fails is reported, and the others are measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from twell.kernels import build as builds
from twell.kernels.backends import cpu, hopper, union_counts
from twell.kernels.training import choose
from twell.workbench.capturing.command import capture
from twell.workbench.options import CaptureOptions
from twell.workbench.training.command import tf32
from twell.workbench.training.corpus import Corpus, wrap
from twell.workbench.training.loop import TrainingLoop
from twell.workbench.training.recipes import from_dict

TURNS, WARM = 12, 4  # steps of each kind, in turns, and those before them
BATCHES = 6  # of a capture at least
GPU_BATCH, CPU_BATCH = 32768, 4096  # tokens


def main() -> int:
    """Take one kind of measurement; return 0 if every model was measured."""
    measures = {"build": build, "captures": captures, "steps": steps, "processor": processor}
    parser = argparse.ArgumentParser(description="Measure the models of the studies.")
    parser.add_argument("what", choices=measures)
    parser.add_argument("--work", type=Path, default=Path("/tmp/studies"))
    parser.add_argument("--text", default="builtin:passages")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=100.0, help="after which no further model is begun")
    parser.add_argument("--tokens", type=int, default=200_000, help="of a capture")
    options = parser.parse_args()
    return measures[options.what](options, time.monotonic() + options.seconds)


def models(work: Path, seeds: int) -> list[Path]:
    """Return the folders of the models whose neurons can be counted, those of the first seed first, or alone."""
    folders = [path.parent for path in work.glob("models/*/training.json")]
    complete = [folder for folder in folders if record(folder)["status"] == "complete" and "silu" not in folder.name]
    chosen = [folder for folder in complete if seeds > 1 or not folder.name.endswith("-1")]
    return sorted(chosen, key=lambda folder: (folder.name.endswith("-1"), folder.name))


def record(folder: Path) -> dict[str, Any]:
    """Return what a training recorded: recipe, corpus, and what was measured at its end."""
    values: dict[str, Any] = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    return values


def each(folders: list[Path], deadline: float, measure: Callable[[Path], object]) -> int:
    """Measure each model; return 0 if all were."""
    failed = 0
    for folder in folders:
        begun = time.monotonic()
        if begun > deadline:
            print(f"{folder.name}: no time left")
            failed += 1
            continue
        try:
            measure(folder)
            print(f"{folder.name}: {time.monotonic() - begun:.1f} s", flush=True)
        except Exception:  # one model that cannot be measured leaves the others to be
            traceback.print_exc()
            failed += 1
    return int(failed > 0)


def build(options: argparse.Namespace, deadline: float) -> int:
    """Compile the kernels that captures and steps take."""
    print("cpu:", cpu.refuses(torch.device("cpu"), torch.float32, 256, 768, 8), flush=True)
    if options.device == "cuda":
        gpu = torch.device("cuda")
        print("hopper:", hopper.refuses(gpu, torch.bfloat16, 256, 768, 8), flush=True)
        print("unions:", builds.failure(union_counts.library(torch.cuda.get_device_capability())), flush=True)
        print("training:", choose(gpu, torch.bfloat16, 256, 768, 16384), flush=True)
    return 0


def captured(folder: Path, options: argparse.Namespace, tokens: int, most: int, **more: Any) -> None:
    """Capture a model on the text, in BATCHES batches or, where these would pass `most` tokens each, in more.

    more: options of the capture, `out` among them
    """
    batch = min(most, max(512, tokens // BATCHES))
    capture(CaptureOptions(model=str(folder), text=(options.text,), tokens=tokens, batch_tokens=batch, **more))


def captures(options: argparse.Namespace, deadline: float) -> int:
    """Capture every model on the text, with timings of every layer; of the second seed half as many tokens."""

    def measure(folder: Path) -> None:
        tokens = options.tokens // (2 if folder.name.endswith("-1") else 1)
        captured(folder, options, tokens, GPU_BATCH, out=options.work / "captures" / folder.name, device=options.device)

    return each(models(options.work, 2), deadline, measure)


def processor(options: argparse.Namespace, deadline: float) -> int:
    """Capture every model of the first seed on the CPU, for its timings."""

    def measure(folder: Path) -> None:
        tokens = min((BATCHES + 2) * CPU_BATCH, options.tokens)
        out = options.work / "captures-cpu" / folder.name
        captured(folder, options, tokens, CPU_BATCH, out=out, device="cpu", timings_share=1.0, probes="counts")

    return each(models(options.work, 1), deadline, measure)


def steps(options: argparse.Namespace, deadline: float) -> int:
    """Time a training step of every model of the first seed, dense and as `twell train` would run it, in turns.

    Writes steps.json: by model, the microseconds of the steps in the order in which they ran, and the sparse layers.
    """
    device, results, shapes = torch.device(options.device), {}, [""]

    def measure(folder: Path) -> None:
        if shapes[-1] != shape(folder):
            torch._dynamo.reset()  # compiled code is kept for a few shapes of a function
            shapes.append(shape(folder))
        with tf32(device):
            results[folder.name] = step_times(folder, options.work / "ids", device)
        (options.work / "steps.json").write_text(json.dumps(results, indent=1), encoding="utf-8")

    return each(sorted(models(options.work, 1), key=shape), deadline, measure)


def shape(folder: Path) -> str:
    """Return what a model's compiled code depends on, as text that sorts."""
    recipe = record(folder)["recipe"]
    return "{d_model} {d_ff} {layers} {gated}".format_map(recipe)


def step_times(folder: Path, ids: Path, device: torch.device) -> dict[str, Any]:
    """Return the microseconds of a model's training steps, dense and sparse. ids: the prepared text"""
    trained = record(folder)
    train, heldout = (np.load(ids / f"{name}.npy", mmap_mode="r") for name in ("train", "heldout"))
    corpus = Corpus(wrap(Tokenizer.from_file(str(ids / "tokenizer.json"))), train, heldout, {}, trained["corpus"])
    training = TrainingLoop(from_dict(trained["recipe"], str(folder)), corpus, device, compiled=device.type == "cuda")
    training.state.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)  # a tied head is not in
    training.layers.update(trained["heldout"]["nnz"])
    times: dict[str, list[float]] = {"dense": [], "sparse": []}
    for turn in range(WARM + TURNS):
        for kind in times:
            microseconds = timed(training, device, training.layers.all_dense() if kind == "dense" else nullcontext())
            times[kind] += [microseconds] if turn >= WARM else []
    choice = training.layers.choice
    medians = {kind: round(median(values)) for kind, values in times.items()}
    print(f"{folder.name}: µs a step {medians}, {training.layers.count} sparse layers by {choice.kernel}")
    return {**times, "sparse_layers": training.layers.count, "kernel": choice.kernel, "reason": choice.reason}


def timed(training: TrainingLoop, device: torch.device, context: AbstractContextManager[None]) -> float:
    """Return the microseconds of one optimizer step in a context."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    with context:
        synchronize()
        begun = time.perf_counter()
        training.one_step()
        synchronize()
        return 1e6 * (time.perf_counter() - begun)


if __name__ == "__main__":
    sys.exit(main())
