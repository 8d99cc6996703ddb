"""What watching costs: a capture against the same forward passes without it.

The idea: the same batches go through the model in three ways, in turns: recorded (counts, sums, copies, files), through
the same kernels with every probe off, and with every FFN dense, as the checkpoint's own code runs it. All three compute
the loss. Only ratios are reported, each from one process and one round of turns next to another.

    overhead(load("data/demo-model"), sources=("builtin:passages",), tokens=20_000)
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from twell.workbench.batches import Batch
from twell.workbench.forward import Inputs, forward
from twell.workbench.manifest import COMPLETE
from twell.workbench.models import LoadedModel
from twell.workbench.options import CaptureOptions
from twell.workbench.reading import read_batches
from twell.workbench.recorder import Recorder, new_manifest
from twell.workbench.sources import Source
from twell.workbench.timing import dense
from twell.workbench.writer import RunWriter


def overhead(
    loaded: LoadedModel, options: CaptureOptions, *, rounds: int = 5, folder: Path | None = None
) -> dict[str, Any]:
    """Median ratios of wall time over `rounds`, after one round that is not counted.

    options: as a capture's; `tokens` bounds the text of one turn, `timings` is left out of it
    folder: where the runs are written and removed again; default the system's folder for such files

    Returns capture_over_unwatched, capture_over_dense and unwatched_over_dense, the least and the greatest of each
    (`_low`, `_high`), tokens, batches, rounds, probes, kernel and device.
    """
    options = replace(options, timings=0)
    batches = list(read_batches(loaded, options, [Source(name) for name in options.text]))

    def plain(run_dense: bool) -> None:
        with dense(loaded) if run_dense else nullcontext():
            for batch in batches:
                forward(loaded, Inputs.of(batch, loaded.device), loss=options.loss).wait()

    with tempfile.TemporaryDirectory(dir=folder) as place:
        names = (Path(place) / f"run-{number}" for number in count())
        turns = {
            "capture": lambda: _record(loaded, batches, replace(options, out=next(names))),
            "unwatched": lambda: plain(False),
            "dense": lambda: plain(True),
        }
        took = [{name: _seconds(turn, loaded.device) for name, turn in turns.items()} for _ in range(rounds + 1)][1:]
    found: dict[str, Any] = {}
    for above, below in (("capture", "unwatched"), ("capture", "dense"), ("unwatched", "dense")):
        ratios = [seconds[above] / seconds[below] for seconds in took]
        name = f"{above}_over_{below}"
        found |= {name: statistics.median(ratios), f"{name}_low": min(ratios), f"{name}_high": max(ratios)}
    tokens = sum(int(batch.lengths.sum()) for batch in batches)
    kernel = loaded.choice(options.batch_tokens).kernel
    about = {"tokens": tokens, "batches": len(batches), "rounds": rounds, "probes": options.probes, "kernel": kernel}
    return found | about | {"device": loaded.device.type}


def _record(loaded: LoadedModel, batches: list[Batch], options: CaptureOptions) -> None:
    recorder = Recorder(loaded, RunWriter(options.out, new_manifest(loaded, options)), options)
    for batch in batches:
        recorder.step(batch)
    recorder.finish(COMPLETE, [])


def _seconds(turn: Callable[[], None], device: torch.device) -> float:
    began = time.perf_counter()
    turn()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
