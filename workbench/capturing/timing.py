"""Time the layers and the whole model, sparse and dense, on the input that the capture just gave them.

The idea: `timing_schedule.py` says what is next; this file measures it. A layer is timed where it stands in the forward
pass: its attention as it runs there anyway, then the dense FFN, the sparse FFN and the dense gate product, each once,
on the same input and in random order. The gate product is what no sparse kernel is spared. The whole model is timed on
a batch after it was captured, dense and sparse, so that the share of each layer in it is known. Each piece is a sample
by itself, with the clock and power of its moment; medians over batches are for the analysis to take. Timed calls run
with probes off and report to nobody, so they change no count.

On a GPU that reports its power, the power of the whole model, dense and sparse, is measured once, which takes 12 s:
with a share of 1 in its first turn, else in the first one by which timings were allowed twice that. On a CPU the FFN is
timed on the first ROWS rows of a batch, which is enough to fill it.

Cost: ALLOWANCE seconds and the share of the capture's time that `--timings-share` gives.
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

from twell.kernels.benchmark.timing import Read, start_timer, time_in_turns
from twell.kernels.modules import Probe
from twell.kernels.stats import Stats
from twell.workbench.capturing.forward import Inputs, OnLayer, forward
from twell.workbench.capturing.timing_schedule import TimingSchedule
from twell.workbench.models.load import LoadedModel
from twell.workbench.power import WINDOW_SECONDS, Gauge, Reading
from twell.workbench.run.schema import PREFILL
from twell.workbench.text.batches import Batch

ALLOWANCE = {"cpu": 4.0, "cuda": 0.05}  # seconds that timings may take however short the capture
ROWS = {"cpu": 1024, "cuda": 2**31}  # rows of a batch that are timed
SPARSE = ("ffn_sparse", "model_sparse")  # operations that the sparse kernel runs; the others are dense
POWER_SECONDS = 2 * WINDOW_SECONDS  # what measuring the power takes: a window dense, and one sparse


class Timings:
    """The rows of the run's `timings` table, made as batches go by; `rows` holds those not written yet."""

    def __init__(
        self,
        loaded: LoadedModel,
        every: int,
        share: float,
        loss: bool,
        generates: bool = False,
        last: int | None = None,
    ) -> None:
        """Begin the clock of the schedule; every, share, last: as in TimingSchedule.

        loss: whether the capture computes it; generates: whether the capture generates. Attention is then not timed,
        because a repetition would spoil its cache, and each layer's FFN is timed in the prompts' pass and in the pass
        after it.
        """
        self.loaded, self.loss, self.generates = loaded, loss, generates
        self.rows: list[dict[str, Any]] = []
        self._device = loaded.device
        self._gauge = Gauge(loaded.device)
        self.schedule = TimingSchedule(
            layers=len(loaded.ffns),
            every=every if loaded.ffns else 0,  # an FFN that is only counted has no faster form
            share=share,
            allowance=ALLOWANCE[loaded.device.type],
            last=last,
            power=self._gauge.reads,
        )
        self._stop: Callable[[], Read] | None = None  # stops the clock of the attention that is running,
        self._attention: Read | None = None  # and this reads it, in microseconds
        self._order = random.Random(0)

    @property
    def spent(self) -> float:
        """Seconds that timings have taken."""
        return self.schedule.spent

    @contextmanager
    def of(self, batch: Batch) -> Iterator[OnLayer | None]:
        """Time pieces of a batch around its forward pass.

        Yields the function that the forward pass is to call with each layer, or None where no layer is timed.
        """
        rows = min(batch.padded, ROWS[self._device.type])
        is_due = self.schedule.begin_batch(batch.number, rows)
        with ExitStack() as stack:
            times_layers = is_due and self.schedule.affords("layer", rows)
            if times_layers and not self.generates:
                self._watch_attention(stack, rows)
            yield partial(self._time_layer, batch, rows) if times_layers else None
        self.schedule.end_batch(batch.padded)
        if is_due and self.schedule.model_is_next:
            self._model_turn(batch, rows)

    def _watch_attention(self, stack: ExitStack, rows: int) -> None:
        """Time the attention of chosen layers until the stack closes."""
        for number, layer in enumerate(self.loaded.blocks):
            attention = getattr(layer, "self_attn", None)
            if attention is not None:
                begin = partial(self._begin_attention, rows, number)
                stack.callback(attention.register_forward_pre_hook(begin, with_kwargs=True).remove)
                stack.callback(attention.register_forward_hook(self._end_attention).remove)

    def _begin_attention(self, rows: int, layer: int, module: nn.Module, args: Any, keywords: dict[str, Any]) -> None:
        if not self.schedule.choose_layer(layer, rows):
            return
        if rows > self.schedule.timed_rows:
            began = self._now()
            module.forward(*args, **keywords)
            self.schedule.spent += self._now() - began
        self._stop = start_timer(self._device)

    def _end_attention(self, *_: Any) -> None:
        if self._stop is not None:
            self._attention = self._stop()
            self._stop = None

    def _time_layer(self, batch: Batch, rows: int, layer: int, x: Tensor, stats: Stats, phase: int = PREFILL) -> None:
        """Time a layer's FFN, if the layer is chosen. x [n, d_model]: its input; rows: how many of it are timed."""
        is_prefill = phase == PREFILL
        if not (self.schedule.choose_layer(layer, rows) if is_prefill else self.schedule.is_chosen(layer)):
            return
        began = self._now()
        ffn, x = self.loaded.ffns[layer], x[: ROWS[self._device.type]]
        gate = partial(linear, x, ffn.w_gate, ffn.b_gate)
        with self.loaded.probing(Probe()):
            operations = {"ffn_dense": partial(ffn.dense, x), "ffn_sparse": partial(ffn, x), "gate": gate}
            took = self._take(operations, self.schedule.warms_up or not is_prefill)
        reading = self._gauge.read()
        if self._attention is not None:
            self._add(batch, layer, batch.padded, None, {"attention": self._attention()}, reading)
            self._attention = None
        self._add(batch, layer, len(x), float(stats.nnz[: len(x)].double().mean()), took, reading, phase)
        self.schedule.book_layer(self._now() - began, sum(took.values()) * 1e-6, rows)

    def _model_turn(self, batch: Batch, rows: int) -> None:
        """Time the whole model, unless this round skips it; if it cannot be afforded yet, it stays next."""
        if not self.schedule.skips_model:
            power = self.schedule.affords_power(POWER_SECONDS)
            if not self.schedule.affords("model", rows, POWER_SECONDS if power else 0.0):
                return
            self._time_model(batch, rows, power)
        self.schedule.next_round()

    def _time_model(self, batch: Batch, rows: int, power: bool) -> None:
        began, warm_up = self._now(), self.schedule.needs_warm_up("model", rows)
        head = batch.head(ROWS[self._device.type])
        run = partial(forward, self.loaded, Inputs.of(head, self._device), loss=self.loss)

        def run_dense() -> None:
            with dense(self.loaded):
                run()

        operations: dict[str, Callable[[], Any]] = {"model_dense": run_dense, "model_sparse": run}
        took, clock = self._take(operations, warm_up), self._gauge.read()[0]
        for op, operation in operations.items():
            reading = self._gauge.window(operation) if power else (clock, None)
            self._add(batch, -1, head.padded, None, {op: took[op]}, reading)
        self.schedule.power_is_due = self.schedule.power_is_due and not power
        self.schedule.book_model(self._now() - began, sum(took.values()) * 1e-6, rows)

    def _now(self) -> float:
        """Return the time once the device has done its work, so that no work of the capture is booked as timings."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _take(self, operations: Mapping[str, Callable[[], Any]], untimed: bool) -> dict[str, float]:
        """Return the microseconds of each operation in one turn; untimed: run each once before."""
        took = time_in_turns(operations, self._device, 1, warm_up=untimed, rng=self._order)
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
        """Add a row for each operation of `took`, by its microseconds."""
        mhz, watts = reading
        for op, microseconds in took.items():
            kernel = self.loaded.choice(rows).kernel if op in SPARSE else "dense"
            about = {"batch": batch.number, "layer": layer, "op": op, "phase": phase, "tokens": rows}
            result = {"nnz_mean": nnz_mean, "microseconds": microseconds, "kernel": kernel}
            self.rows.append(about | result | {"sm_mhz": mhz, "watts": watts})


@contextmanager
def dense(loaded: LoadedModel) -> Iterator[None]:
    """Run every FFN of the model densely inside this context, as the checkpoint's own code would."""
    with ExitStack() as stack:
        for ffn in loaded.ffns:
            ffn.runs_dense = True
            stack.callback(setattr, ffn, "runs_dense", False)
        yield
