"""What watching costs: a capture against the same forward passes without it.

The idea: the same text goes through the model in several ways, in turns: recorded with each kind of probe (read,
counted, added up, written), through the same kernels with every probe off, and with every FFN dense, as the
checkpoint's own code runs it. All compute the loss, and all have the next batch ready before the device is done with
one. Only ratios are reported, each from one process and one round of turns next to another. A turn's beginning and end
are in it, so give it text for 20 s or more where the cost of a long capture is asked for.

    overhead(load("data/demo-model"), CaptureOptions(..., tokens=100_000))
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from twell.workbench.batches import Batch
from twell.workbench.forward import Counted, Inputs, forward
from twell.workbench.manifest import COMPLETE
from twell.workbench.models import LoadedModel
from twell.workbench.options import CaptureOptions
from twell.workbench.reading import read_batches
from twell.workbench.recorder import Recorder, new_manifest
from twell.workbench.sources import open_sources
from twell.workbench.timing import dense
from twell.workbench.writer import RunWriter

WARM = 2  # batches of each way before the first turn


def overhead(
    loaded: LoadedModel,
    options: CaptureOptions,
    *,
    probes: tuple[str, ...] = ("counts", "all"),
    run_dense: bool = True,
    rounds: int = 3,
    folder: Path | None = None,
) -> dict[str, Any]:
    """Median ratios of wall time over `rounds`, to that of the forward passes with probes off.

    options: as a capture's; `tokens` bounds the text of one turn
    folder: where the runs are written and removed again; default the system's folder for such files

    Returns for each of `probes`, and for dense, its ratio `NAME_over_unwatched`, and the least and the greatest of it
    (`_low`, `_high`); seconds (median of a turn with probes off), tokens, batches, rounds, kernel and device.
    """
    held = list(_read(loaded, options))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        runs = (Path(place) / f"run-{number}" for number in count())

        def recorded(kind: Any, batches: Iterable[Batch] | None) -> None:
            _record(loaded, replace(options, probes=kind, out=next(runs)), batches)

        ways: dict[str, Callable[[Iterable[Batch] | None], None]] = {
            "unwatched": lambda batches: _pass(loaded, batches or held, options.loss, False)
        }
        ways |= {kind: partial(recorded, kind) for kind in probes}
        if run_dense:
            ways["dense"] = lambda batches: _pass(loaded, batches or held, options.loss, True)
        for way in ways.values():
            way(held[:WARM])
        took = [{name: _seconds(way, loaded.device) for name, way in ways.items()} for _ in range(rounds)]
    found: dict[str, Any] = {}
    for name in [*ways][1:]:
        ratios = [seconds[name] / seconds["unwatched"] for seconds in took]
        said = f"{name}_over_unwatched"
        found |= {said: statistics.median(ratios), f"{said}_low": min(ratios), f"{said}_high": max(ratios)}
    about = {"seconds": statistics.median(seconds["unwatched"] for seconds in took)}
    about |= {"tokens": sum(int(batch.lengths.sum()) for batch in held), "batches": len(held), "rounds": rounds}
    return found | about | {"kernel": loaded.choice(held[0].padded).kernel, "device": loaded.device.type}


def _read(loaded: LoadedModel, options: CaptureOptions) -> Any:
    return read_batches(loaded, options, open_sources(options.text))


def _pass(loaded: LoadedModel, batches: Iterable[Batch], loss: bool, run_dense: bool) -> None:
    before: Counted | None = None
    with dense(loaded) if run_dense else nullcontext():
        for batch in batches:
            counted = forward(loaded, Inputs.of(batch, loaded.device), loss=loss)
            if before is not None:
                before.wait()
            before = counted
    if before is not None:
        before.wait()


def _record(loaded: LoadedModel, options: CaptureOptions, batches: Iterable[Batch] | None) -> None:
    """A capture, of the options' text or of these batches."""
    recorder = Recorder(loaded, RunWriter(options.out, new_manifest(loaded, options, options.text)), options)
    with closing(_read(loaded, options)) if batches is None else nullcontext(batches) as texts:
        for batch in texts:
            recorder.step(batch)
    recorder.finish(COMPLETE, [])


def _seconds(way: Callable[[None], None], device: torch.device) -> float:
    began = time.perf_counter()
    way(None)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
