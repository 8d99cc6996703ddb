"""Measure what writing examples costs: each part of a run, and its end.

    python tests/support/examples_cost.py [LAYERS [K]]

LAYERS: of 5 632 neurons, default 28; K: examples of each neuron and kind, default 8. They are made up, seven neurons in
eight have them; between two parts one in CHANGED is replaced, as late in a capture. Prints the seconds until they
are on disk, the processors' time, and the bytes. Cost: a minute on two cores, 3 GB of memory.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conftest import made_activity, made_manifest

from twell.kernels.backends.selection import WINDOW
from twell.workbench.capturing.examples import Examples, Kept
from twell.workbench.run.store import open_run
from twell.workbench.run.writer import RunWriter

D_FF, PARTS, CHANGED = 5632, 3, 20


def made(layers: int, k: int, seed: int) -> Kept:
    """Return examples of seven neurons in eight, whose windows are zero but for the example and a few tokens more."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layers, D_FF, k)
    value = torch.rand(shape, generator=generator).exp().to(torch.bfloat16).float().sort(descending=True).values
    window = torch.rand(*shape, WINDOW, generator=generator)
    window = torch.where(window < 0.05, window * 20, 0.0)
    window[..., WINDOW // 2] = value
    sequence = torch.randint(0, 5000, shape, generator=generator, dtype=torch.int32)
    sequence[:, torch.arange(D_FF) % 8 == 7] = -1
    position = torch.randint(0, 2048, shape, generator=generator, dtype=torch.int32)
    draw = torch.randint(0, 2**31 - 1, shape, generator=generator, dtype=torch.int64).int()
    return Kept(value, draw, sequence, position, window.to(torch.bfloat16))


def replaced(kept: Kept, seed: int) -> Kept:
    """Return examples of which one in CHANGED is another."""
    layers, _, k = kept.value.shape
    other = made(layers, k, seed)
    fresh = torch.rand(kept.value.shape, generator=torch.Generator().manual_seed(seed)) < 1 / CHANGED
    columns = []
    for item in fields(kept):
        mine, others = getattr(kept, item.name), getattr(other, item.name)
        columns.append(torch.where(fresh[..., None] if mine.dim() > fresh.dim() else fresh, others, mine))
    return Kept(*columns)


def main(layers: int, k: int) -> None:
    examples = Examples(layers, D_FF, k)
    examples._kept = {kind: made(layers, k, seed) for seed, kind in enumerate(("top", "sample"))}
    with tempfile.TemporaryDirectory() as place:
        writer = RunWriter(Path(place) / "run", made_manifest(layers, D_FF))
        for part in range(PARTS):
            writer.add("activity", made_activity(1, 64, layers, first=part))
            tables = examples.tables()
            began, used = time.perf_counter(), time.process_time()
            close = writer.finish if part == PARTS - 1 else writer.close_part
            close(tables=lambda tables=tables: (("examples", columns) for columns in tables()))
            writer.drain()
            files = list((Path(place) / "run" / "examples").glob("*"))
            size = sum(file.stat().st_size for file in files) / 1e6
            took = f"{time.perf_counter() - began:.2f} s, {time.process_time() - used:.2f} s of processors"
            print(f"part {part}: {took}, {size:.1f} MB in {len(files)} files", flush=True)
            examples._kept = {kind: replaced(kept, 10 * part + len(kind)) for kind, kept in examples._kept.items()}
        run = open_run(Path(place) / "run")
        began = time.perf_counter()
        rows = len(run.arrow("examples"))
        print(f"{rows:,} examples, read in {time.perf_counter() - began:.2f} s")


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*[*given, *(28, 8)[len(given) :]])
