"""What a whole capture costs, against the same forward passes without it.

The idea: the same text goes through the model in several ways, in turns: recorded with each kind of probe (read,
counted, added up, written), through the same kernels with every probe off, and with every FFN dense, as the
checkpoint's own code runs it. All read the text and compute the loss alike, one batch behind the device. Only ratios
are reported, each from one process and one round of turns next to another. A turn is told apart into its beginning
(until the first batch is read), its end (after the last one is given to the device) and what lies between, less what
goes into timings, a share of the run that an option sets. Give it text for 20 s or more where the cost of a long
capture is asked for.

    took = in_turns(load("builtin:demo"), CaptureOptions(..., tokens=100_000))  # every turn, as it was measured
    ratios(took)
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from twell.workbench.capturing import forward as forwards
from twell.workbench.capturing.forward import Counted, Inputs, forward
from twell.workbench.capturing.prefetch import BatchStream, read_batches
from twell.workbench.capturing.recorder import Recorder
from twell.workbench.capturing.resume import new_manifest
from twell.workbench.capturing.timing.timings import SPARSE, dense
from twell.workbench.models.load import LoadedModel
from twell.workbench.options import CaptureOptions
from twell.workbench.run.manifest import COMPLETE
from twell.workbench.run.store import open_run
from twell.workbench.run.writer import RunWriter
from twell.workbench.text.batches import Batch
from twell.workbench.text.sources import open_sources

WARM = 2  # batches of each way before the first turn


@dataclass(frozen=True)
class Turn:
    """Seconds of one turn: whole; until its first batch is read; after its last is given to the device; in timings.

    batches: tokens of each; reads: when each was read, from the beginning on
    timed: by layer (-1: the whole model) how often it was
    """

    whole: float
    start: float
    end: float
    batches: tuple[int, ...]
    timings: float = 0.0
    timed: Mapping[int, int] = field(default_factory=dict)
    reads: tuple[float, ...] = ()

    @property
    def steady(self) -> float:
        """What is left of it: all batches but the last, whose time is in `end`."""
        return self.whole - self.start - self.end - self.timings

    def tokens_a_second(self, after: int = 0) -> float:
        """Return the rate of the steady part; of its batches from a later one on with what timings took there."""
        if after:  # the device begins a batch when the next one is read
            return sum(self.batches[after - 1 : -1]) / (self.whole - self.end - self.reads[after])
        return sum(self.batches[:-1]) / self.steady


def in_turns(
    loaded: LoadedModel,
    options: CaptureOptions,
    *,
    probes: tuple[str, ...] = ("counts", "all"),
    run_dense: bool = True,
    rounds: int = 3,
    folder: Path | None = None,
) -> list[dict[str, Turn]]:
    """Run each way in turns, round after round, after WARM batches of each: "unwatched", `probes`, "dense". Every other
    round goes the other way about, as a device that warms up makes later turns slower.

    options: as a capture's; `tokens` bounds the text of one turn
    folder: where the runs are written and removed again; default the system's folder for such files
    """
    warm = list(islice(read_again(loaded, options), WARM))

    def unwatched(texts: Iterable[Batch]) -> Turn:
        return unwatched_turn(loaded, texts, options.loss)

    def run_densely(texts: Iterable[Batch]) -> Turn:
        with dense(loaded):
            return unwatched_turn(loaded, texts, options.loss)

    with tempfile.TemporaryDirectory(dir=folder) as place:
        runs = (Path(place) / f"run-{number}" for number in count())

        def recorded(kind: Any, texts: Iterable[Batch]) -> Turn:
            timed = 0 if texts is warm else options.timings
            return recorded_turn(loaded, replace(options, probes=kind, timings=timed, out=next(runs)), texts)

        ways: dict[str, Callable[[Iterable[Batch]], Turn]] = {"unwatched": unwatched}
        ways |= {kind: partial(recorded, kind) for kind in probes}
        ways |= {"dense": run_densely} if run_dense else {}
        for way in ways.values():
            way(warm)
        return [_round(loaded, options, ways, number % 2 == 1) for number in range(rounds)]


def _round(
    loaded: LoadedModel, options: CaptureOptions, ways: dict[str, Callable[[Iterable[Batch]], Turn]], backwards: bool
) -> dict[str, Turn]:
    took = {name: ways[name](read_again(loaded, options)) for name in (reversed(ways) if backwards else ways)}
    return {name: took[name] for name in ways}


def ratios(took: list[dict[str, Turn]]) -> dict[str, Any]:
    """Return medians over the rounds of `in_turns`, relative to forward passes with probes off.

    Returns for each other way the ratio of whole turns `NAME_over_unwatched`, the least and the greatest of it (`_low`,
    `_high`) and that of their steady parts (`_steady`); of these and of unwatched the seconds of a turn, its start, end
    and timings (`NAME_seconds`, `NAME_start`, …; medians); tokens, batches and rounds.
    """
    result: dict[str, Any] = {}
    for name in took[0]:
        turns = [turn[name] for turn in took]
        result[f"{name}_seconds"] = statistics.median(turn.whole for turn in turns)
        for part in ("start", "end", "timings"):
            result[f"{name}_{part}"] = statistics.median(getattr(turn, part) for turn in turns)
        if name == "unwatched":
            continue
        whole = [turn[name].whole / turn["unwatched"].whole for turn in took]
        label = f"{name}_over_unwatched"
        result |= {label: statistics.median(whole), f"{label}_low": min(whole), f"{label}_high": max(whole)}
        result[f"{label}_steady"] = statistics.median(turn[name].steady / turn["unwatched"].steady for turn in took)
    read = took[0]["unwatched"].batches
    return result | {"tokens": sum(read), "batches": len(read), "rounds": len(took)}


def read_again(loaded: LoadedModel, options: CaptureOptions) -> BatchStream:
    return read_batches(loaded, options, open_sources(options.text))


def unwatched_turn(loaded: LoadedModel, texts: Iterable[Batch], loss: bool) -> Turn:
    """Run forward passes with probes off, and the loss as a model's own code has it: without entropy."""
    before: Counted | None = None
    clock = _Clock(loaded.device)
    with loss_alone():
        for batch in clock.begun(texts):
            counted = forward(loaded, Inputs.of(batch, loaded.device), loss=loss)
            if before is not None:
                before.wait()
            before = counted
        clock.given()
        if before is not None:
            before.wait()
    return clock.turn()


@contextmanager
def loss_alone() -> Iterator[None]:
    """Have forward passes compute no entropy."""
    both = forwards.loss_and_entropy
    forwards.loss_and_entropy = lambda logits, ids: cross_entropy(logits.float(), ids, reduction="none").expand(2, -1)
    try:
        yield
    finally:
        forwards.loss_and_entropy = both


def recorded_turn(loaded: LoadedModel, options: CaptureOptions, texts: Iterable[Batch]) -> Turn:
    """Capture the batches."""
    clock = _Clock(loaded.device)
    recorder = Recorder(loaded, RunWriter(options.out, new_manifest(loaded, options, options.text)), options)
    for batch in clock.begun(texts):
        recorder.step(batch)
    clock.given()
    recorder.finish(COMPLETE, [])
    turn = clock.turn(recorder.timings.spent)
    run = open_run(options.out)
    timed = run.arrow("timings", ["layer", "op"]).to_pylist() if run.has("timings") else []
    return replace(turn, timed=Counter(row["layer"] for row in timed if row["op"] in SPARSE))


class _Clock:
    """Of one turn, from now on."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._began = device, time.perf_counter()
        self._read = self._given = self._began
        self._batches: list[int] = []
        self._reads: list[float] = []

    def begun(self, texts: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches; the first ends the turn's beginning."""
        for number, batch in enumerate(texts):
            if not number:
                self._read = time.perf_counter()
            self._batches.append(int(batch.lengths.sum()))
            self._reads.append(time.perf_counter() - self._began)
            yield batch

    def given(self) -> None:
        """Note that all batches have been given to the device."""
        self._given = time.perf_counter()

    def turn(self, timings: float = 0.0) -> Turn:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        start, end = self._read - self._began, now - self._given
        return Turn(now - self._began, start, end, tuple(self._batches), timings, reads=tuple(self._reads))
