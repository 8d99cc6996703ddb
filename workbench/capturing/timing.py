"""How long the layers take, sparse and dense, on the input that the capture just gave them.

The idea: a piece at a time, spread over the run. A piece is one layer where it stands in the forward pass: its
attention as it runs there anyway, then the dense FFN, the sparse FFN and the dense gate product, each once, on the same
input and in an order that is drawn anew. The gate product is what no sparse kernel is spared. Layers have their turns
one after another, round after round, at most once a batch. After the first of every MODEL_EVERY rounds the whole model
has its turn on a batch, dense and sparse, so that each share in it can be told. Each piece is a sample by itself, with
the clock and power of its moment; medians over batches are for the analysis to take. Timed calls run with probes off
and are heard by nobody, so they change no count.

Cost, one rule: a piece is timed once what it will take fits into ALLOWANCE seconds and a share of the time since the
capture began. What is next in turn waits until then, so a capture that ends early has the pieces that it came to. What
a piece will take is what the last of its kind took by the row: of the first layer nothing is known, and the whole model
is taken for PASSES times what the capture itself takes for as many rows. A turn that is not timed comes first where
more rows run than before, whose kernels and memory are to be found yet, and where a turn is shorter than LONG, so that
what lies in caches and queues would sway it. On a CPU the FFN is timed on the first ROWS rows of a batch, which is
enough to fill it.

On a GPU that reports its power, the power that the whole model draws, dense and sparse, is asked for once, 12 s: with a
share of 1 at its first turn, else at the first one by which timings were allowed twice that.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from twell.kernels.benchmark.timing import Read, started, turns
from twell.kernels.modules import Probe
from twell.kernels.params import Stats
from twell.workbench.capturing.forward import Inputs, OnLayer, forward, probing
from twell.workbench.models.load import LoadedModel
from twell.workbench.power import WINDOW_SECONDS, Gauge, Reading
from twell.workbench.run.schema import PREFILL
from twell.workbench.text.batches import Batch

ALLOWANCE = {"cpu": 4.0, "cuda": 0.05}  # seconds that may go into timings whatever the length of the capture
ROWS = {"cpu": 1024, "cuda": 2**31}  # rows of a batch that are timed
SPARSE = ("ffn_sparse", "model_sparse")  # what the sparse kernel runs; the rest is dense
LAYER, MODEL = "layer", "model"  # kinds of pieces
MODEL_EVERY = 2  # rounds of the layers between two turns of the whole model
PASSES = 3.0  # dense and sparse, over the capture's own pass: what the whole model is taken for before it was timed
LONG = 0.02  # seconds


class Timings:
    """Collects the rows of the run's `timings` table as batches go by; `rows` holds those not yet fetched."""

    def __init__(
        self,
        loaded: LoadedModel,
        every: int,
        share: float,
        loss: bool,
        generates: bool = False,
        last: int | None = None,
    ) -> None:
        """`every`: batches from one in which pieces may be timed to the next, 0 for none; `share`: of the capture's
        time that they may take beside ALLOWANCE, from 1 on all; `loss`: as the capture computes it; `generates`:
        attention, whose cache a repetition would spoil, is then not timed, and each layer's FFN in the prompts' pass
        and in the one after it; `last`: the layer of a run that goes on that was timed last (-1: the whole model). It
        has had its ALLOWANCE."""
        self.loaded, self.share, self.loss, self.generates = loaded, share, loss, generates
        self.every = every if loaded.ffns else 0  # what only counts has no faster form
        self.rows: list[dict[str, Any]] = []
        self.spent = 0.0  # seconds
        self._kind = loaded.device.type
        self._allowance = ALLOWANCE[self._kind] if last is None else 0.0
        self._gauge = Gauge(loaded.device)
        self._powered = not self._gauge.reads  # whether nothing is left to ask of the device's power
        self._started, self._read = time.perf_counter(), 0  # and padded rows of the capture since
        self._next = 0 if last is None else last + 1  # the layer whose turn it is; after the last one the whole model's
        self._round = 1 if last == -1 else 0
        self._timed: set[int] = set()  # layers, in this batch
        self._untimed = False  # whether a turn that is not timed comes first, in the layer at hand
        self._stop: Callable[[], Read] | None = None  # the watch that runs while a layer's attention does,
        self._attention: Read | None = None  # and what reads it
        self._turn: dict[str, float] = {}  # seconds a row that the last piece of each kind took for a turn
        self._most = self._largest = 0  # rows that have been timed, and rows of any batch
        self._order = random.Random(0)

    @contextmanager
    def of(self, batch: Batch) -> Iterator[OnLayer | None]:
        """Around the batch's forward pass, which is to tell each layer to what comes out, if anything does."""
        rows = min(batch.padded, ROWS[self._kind])
        self._largest, self._timed = max(self._largest, rows), set()
        # a batch that is due and no remainder, whose times would stand for no other's
        due = self.every > 0 and batch.number % self.every == 0 and 2 * rows >= self._largest
        with ExitStack() as stack:
            hears = due and self._affords(LAYER, rows)
            for number, layer in enumerate(self.loaded.blocks if hears and not self.generates else ()):
                attention = getattr(layer, "self_attn", None)
                if attention is not None:
                    begins = partial(self._begin_attention, rows, number)
                    stack.callback(attention.register_forward_pre_hook(begins, with_kwargs=True).remove)
                    stack.callback(attention.register_forward_hook(self._end_attention).remove)
            yield partial(self._ffn, batch, rows) if hears else None
        self._read += batch.padded
        if due and self._next == len(self.loaded.ffns):
            self._whole(batch, rows)

    def _affords(self, kind: str, rows: int, more: float = 0.0) -> bool:
        """Whether a piece of so many rows, and so many seconds more, may be timed now."""
        passed = time.perf_counter() - self._started
        took = (1 + self._cold(kind, rows)) * self._seconds(kind, rows) + more
        return self.share >= 1 or self.spent + took <= self._allowance + self.share * passed

    def _seconds(self, kind: str, rows: int) -> float:
        """What a turn of so many rows will take."""
        if kind in self._turn:
            return self._turn[kind] * rows
        pace = (time.perf_counter() - self._started - self.spent) / max(1, self._read)
        return PASSES * pace * rows if kind == MODEL else 0.0

    def _cold(self, kind: str, rows: int) -> bool:
        """Whether a turn that is not timed comes first."""
        return rows > self._most or self._seconds(kind, rows) < LONG

    def _chosen(self, layer: int, rows: int) -> bool:
        """Whether a layer is timed in this batch; its turn is over with that."""
        if layer == self._next and self._affords(LAYER, rows):
            self._timed.add(layer)
            self._next += 1
            self._untimed, self._turn[LAYER] = self._cold(LAYER, rows), 0.0
        return layer in self._timed

    def _begin_attention(self, rows: int, layer: int, module: nn.Module, args: Any, given: dict[str, Any]) -> None:
        if not self._chosen(layer, rows):
            return
        if rows > self._most:
            began = self._now()
            module.forward(*args, **given)
            self.spent += self._now() - began
        self._stop = started(self.loaded.device)

    def _end_attention(self, *_: Any) -> None:
        if self._stop is not None:
            self._attention = self._stop()
            self._stop = None

    def _ffn(self, batch: Batch, rows: int, layer: int, x: Tensor, stats: Stats, phase: int = PREFILL) -> None:
        prefill = phase == PREFILL
        if not (self._chosen(layer, rows) if prefill else layer in self._timed):
            return
        began = self._now()
        ffn, x = self.loaded.ffns[layer], x[: ROWS[self._kind]]
        gate = partial(linear, x, ffn.w_gate, ffn.b_gate)
        with probing(self.loaded.probe, Probe()):
            operations = {"ffn_dense": partial(ffn.dense, x), "ffn_sparse": partial(ffn, x), "gate": gate}
            took = self._take(operations, self._untimed or not prefill)
        now = self._gauge.read()
        if self._attention is not None:
            self._add(batch, layer, batch.padded, None, {"attention": self._attention()}, now)
            self._attention = None
        self._add(batch, layer, len(x), float(stats.nnz[: len(x)].double().mean()), took, now, phase)
        self._book(began, LAYER, rows, took)
        self._most = max(self._most, rows)

    def _whole(self, batch: Batch, rows: int) -> None:
        """The whole model's turn: passed over in most rounds, else waited for."""
        if self._round % MODEL_EVERY == 0:
            windows = 2 * WINDOW_SECONDS
            passed = time.perf_counter() - self._started
            power = not self._powered and (self.share >= 1 or self.share * passed >= 2 * windows)
            if not self._affords(MODEL, rows, windows if power else 0.0):
                return
            self._time_model(batch, rows, power)
        self._next, self._round = 0, self._round + 1

    def _time_model(self, batch: Batch, rows: int, power: bool) -> None:
        began, untimed = self._now(), self._cold(MODEL, rows)
        part = batch.head(ROWS[self._kind])
        run = partial(forward, self.loaded, Inputs.of(part, self.loaded.device), loss=self.loss)

        def run_dense() -> None:
            with dense(self.loaded):
                run()

        operations: dict[str, Callable[[], Any]] = {"model_dense": run_dense, "model_sparse": run}
        took, clock = self._take(operations, untimed), self._gauge.read()[0]
        for op, operation in operations.items():
            reading = self._gauge.window(operation) if power else (clock, None)
            self._add(batch, -1, part.padded, None, {op: took[op]}, reading)
        self._powered = self._powered or power
        self._turn[MODEL] = 0.0
        self._book(began, MODEL, rows, took)

    def _now(self) -> float:
        """Once the device has done what it was given, so that no work of the capture counts as spent on timings."""
        if self._kind == "cuda":
            torch.cuda.synchronize(self.loaded.device)
        return time.perf_counter()

    def _book(self, began: float, kind: str, rows: int, took: dict[str, float]) -> None:
        """What has been spent since `began`, and what a turn of these operations takes."""
        self.spent += self._now() - began
        self._turn[kind] += sum(took.values()) * 1e-6 / rows

    def _take(self, operations: Mapping[str, Callable[[], Any]], untimed: bool) -> dict[str, float]:
        """Microseconds of each operation in one turn."""
        took = turns(operations, self.loaded.device, 1, untimed=untimed, shuffled=self._order)
        return {op: times[0] for op, times in took.items()}

    def _add(
        self,
        batch: Batch,
        layer: int,
        rows: int,
        nnz_mean: float | None,
        took: dict[str, float],
        reading: Reading,
        phase: int = PREFILL,
    ) -> None:
        mhz, watts = reading
        for op, microseconds in took.items():
            kernel = self.loaded.choice(rows).kernel if op in SPARSE else "dense"
            about = {"batch": batch.number, "layer": layer, "op": op, "phase": phase, "tokens": rows}
            found = {"nnz_mean": nnz_mean, "microseconds": microseconds, "kernel": kernel}
            self.rows.append(about | found | {"sm_mhz": mhz, "watts": watts})


@contextmanager
def dense(loaded: LoadedModel) -> Iterator[None]:
    """The model with every FFN run densely, as the checkpoint's own code would."""
    with ExitStack() as stack:
        for ffn in loaded.ffns:
            ffn.forward = ffn.dense  # type: ignore[method-assign]
            stack.callback(ffn.__dict__.pop, "forward")
        yield
