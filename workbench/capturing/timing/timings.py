"""Time every sparse call of a capture where it runs, and dense calls beside it now and then.

The idea: marks before and after each layer's sparse FFN in the capture's own pass (`call_times.py`), read when the
counts of the batch are fetched. Nothing waits for the device and nothing runs twice; each row of `timings` has the time
and the nnz of exactly that call. A row `pass` has the batch's whole pass, less what was timed beside it.

Dense calls are calibrations: `calibration.py` says which layers of a batch run their dense FFN and their dense gate
product once more, on the input that they just had. The whole model is calibrated after a batch, dense and sparse, with
every probe off. Attention is timed where it runs, in batches with a calibration. Calibrations report to nobody, so they
change no count.

Cost: two marks a layer; calibrations as `calibration.py` bounds them. On a GPU that reports its power, the power of the
whole model takes 12 s, and is measured whenever the share of calibrations has room for it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import linear

from twell.workbench.capturing.forward import Inputs, forward
from twell.workbench.capturing.timing.calibration import Calibrations, Kind
from twell.workbench.capturing.timing.call_times import MODEL, BatchTimes, Call, Marks
from twell.workbench.models.load import LoadedModel
from twell.workbench.power import WINDOW_SECONDS, Gauge, PowerReading
from twell.workbench.run.schema import PREFILL, WHOLE_MODEL
from twell.workbench.text.batches import Batch

ROWS = {"cpu": 2048, "cuda": 32_768}  # rows of a batch that a dense FFN runs on, at most
MODEL_ROWS = {"cpu": 2048, "cuda": 16_384}  # rows that the whole model runs on, or those of one longer sequence
SPARSE = ("ffn_sparse", "model_sparse", "pass")  # operations that the sparse kernel runs; the others are dense
COUNTED = ("ffn_sparse", "ffn_dense", "gate")  # operations whose input's nnz is known
POWER_SECONDS = 2 * WINDOW_SECONDS  # what measuring the power takes: a window dense, and one sparse
GAUGE_SECONDS = 0.5  # between two readings of the device's clock and power


class Timings:
    """The rows of the run's `timings` table, made as batches go by; `rows` holds those not written yet."""

    def __init__(
        self,
        loaded: LoadedModel,
        every: int,
        share: float,
        loss: bool,
        generates: bool = False,
        seconds: float = 0.0,
    ) -> None:
        """Begin the clock. every, share: as in Calibrations; loss: whether the capture computes it.

        generates: whether the capture generates; dense FFNs then run in the prompts' pass and in the one after it
        seconds: of the capture until now, where it is resumed
        """
        self.loaded, self.loss, self.generates = loaded, loss, generates
        self.rows: list[dict[str, Any]] = []
        self._device = loaded.device
        self._gauge = Gauge(loaded.device)
        layers = len(loaded.ffns)  # none where FFNs are only counted: they have no faster form
        self.calibrations = Calibrations(layers, every, share, loaded.device.type)
        self._marks = Marks(loaded.device)
        self._began, self._before = self._marks.mark(), seconds
        self._warm: set[tuple[int, int]] = set()  # (layer or MODEL, rows) shapes that have run densely
        self._reading: tuple[float, PowerReading] | None = None  # the last one, and when it was taken
        self._order = random.Random(0)

    @property
    def spent(self) -> float:
        """Seconds that calibrations have taken, as far as they were read."""
        return self.calibrations.spent

    @contextmanager
    def of(self, batch: Batch, last_chance: bool = False) -> Iterator[BatchTimes | None]:
        """Time a batch around its forward pass, or yield None where nothing is timed; for last_chance see Calibrations.

        The forward pass is to put its marks into what is yielded.
        """
        if not self.calibrations.every:
            yield None
            return
        times = BatchTimes(self._marks, lambda *given: self._calibrate_layer(times, *given))
        self.calibrations.begin_batch(batch.number, batch.padded, last_chance)
        with ExitStack() as stack:
            if self.calibrations.layers and not self.generates:
                self._watch_attention(stack, times, batch.padded)
            yield times
        if self.calibrations.model_is_due():
            self._calibrate_model(times, batch)

    def _watch_attention(self, stack: ExitStack, times: BatchTimes, rows: int) -> None:
        """Time the attention of every layer until the stack closes."""

        def begin(*_: Any) -> None:
            times.open("attention")

        def end(layer: int, *_: Any) -> None:
            times.close("attention", layer, rows)

        for layer, block in enumerate(self.loaded.blocks):
            attention = getattr(block, "self_attn", None)
            if isinstance(attention, nn.Module):
                stack.callback(attention.register_forward_pre_hook(begin).remove)
                stack.callback(attention.register_forward_hook(partial(end, layer)).remove)

    def _calibrate_layer(self, times: BatchTimes, layer: int, x: Tensor, phase: int) -> None:
        """Run a layer's dense FFN and gate product on x [n, d_model], the input it just had, if it is chosen."""
        if layer not in self.calibrations.layers:
            return
        ffn, x = self.loaded.ffns[layer], x[: ROWS.get(self._device.type, ROWS["cpu"])]
        gate = partial(linear, x, ffn.w_gate, ffn.b_gate)
        with times.beside():
            self._take(times, {"ffn_dense": partial(ffn.dense, x), "gate": gate}, layer, len(x), phase)

    def _calibrate_model(self, times: BatchTimes, batch: Batch) -> None:
        """Run the whole model on the batch's first sequences, dense and sparse, with every probe off."""
        head = batch.head(MODEL_ROWS.get(self._device.type, MODEL_ROWS["cpu"]))
        run = partial(forward, self.loaded, Inputs.of(head, self._device), loss=self.loss)

        def run_dense() -> None:
            with dense(self.loaded):
                run()

        operations: dict[str, Callable[[], Any]] = {"model_dense": run_dense, "model_sparse": run}
        with times.beside():
            calls = self._take(times, operations, MODEL, head.padded, PREFILL)
            if self._gauge.reads and self.calibrations.affords(POWER_SECONDS):
                for call in calls:
                    call.reading = self._gauge.window(operations[call.op])

    def _take(
        self, times: BatchTimes, operations: dict[str, Callable[[], Any]], layer: int, rows: int, phase: int
    ) -> list[Call]:
        """Run operations between marks, once each in random order; where the shape is new, dense ones once before too.

        The capture itself runs the sparse ones, and never a dense one.
        """
        names, shape = list(operations), (min(layer, 0), rows)
        self._order.shuffle(names)
        if shape not in self._warm:
            self._warm.add(shape)
            for name in names:
                if name not in SPARSE:
                    operations[name]()
        calls = []
        for name in names:
            times.open(name)
            operations[name]()
            calls += [call for call in (times.close(name, layer, rows, phase),) if call is not None]
        return calls

    def record(self, batch: Batch, times: BatchTimes) -> None:
        """Add the rows of a batch whose counts have arrived, and use its marks again."""
        if times.aside:  # the whole model runs after the batch: wait for it, as the device has the next batch by now
            self._marks.wait(times.aside[-1][1])
        self.rows += self._rows_of(batch, times)
        self._book(times)
        times.free()

    def _rows_of(self, batch: Batch, times: BatchTimes) -> Iterator[dict[str, Any]]:
        """Yield the rows of a batch whose marks the device has passed."""
        ended = self._marks.microseconds(self._began, times.whole.end)
        about = {"batch": batch.number, "seconds": self._before + ended * 1e-6, "load": machine_load()}
        reading, means = self._read_gauge(), times.nnz_means()
        calls: dict[tuple[int, str, int], list[Call]] = {}
        for call in times.calls:  # of a generation's later passes those of one layer make one row
            calls.setdefault((call.layer, call.op, call.phase), []).append(call)
        for (layer, op, phase), same in calls.items():
            took = [self._microseconds(call, times) for call in same]
            if min(took) < 0:  # the clock went back
                continue
            mhz, watts = same[0].reading or (reading[0], None if op in WHOLE_MODEL else reading[1])
            rows = [batch.padded if op == "pass" else call.rows for call in same]
            kernel = self.loaded.choice(max(rows)).kernel if op in SPARSE else "dense"
            tokens = int(batch.lengths.sum()) if op == "pass" else sum(rows)
            mean = means.get((layer, phase)) if op in COUNTED else None
            key = {"layer": layer, "op": op, "phase": phase, "tokens": tokens}
            result = {"nnz_mean": mean, "microseconds": sum(took), "kernel": kernel}
            yield about | key | result | {"sm_mhz": mhz, "watts": watts}

    def columns(self) -> dict[str, list[Any]]:
        """Return `rows` by column; none if there is no row."""
        return by_column(self.rows)

    def columns_until(self, batch: Batch, times: BatchTimes | None) -> dict[str, list[Any]]:
        """Return `rows` by column, followed by those of the batch that the device has; none if there is no row.

        Only a CPU has passed that batch's marks by now: a reader need not wait for the next batch.
        """
        newest = self._rows_of(batch, times) if times is not None and self._device.type == "cpu" else ()
        return by_column([*self.rows, *newest])

    def _microseconds(self, call: Call, times: BatchTimes) -> float:
        """Return the time of a call; of the pass without what ran beside it."""
        took = self._marks.microseconds(call.begin, call.end)
        return took - sum(self._marks.microseconds(*pair) for pair in times.inside) if call.op == "pass" else took

    def _book(self, times: BatchTimes) -> None:
        """Book the seconds that a batch's calibrations took."""
        took: dict[Kind, tuple[int, float]] = {}
        inside, after = times.inside, times.aside[len(times.inside) :]
        kinds: tuple[tuple[Kind, list[tuple[Any, Any]]], ...] = (("layer", inside), ("model", after))
        for kind, pairs in kinds:
            if pairs:
                took[kind] = len(pairs), sum(self._marks.microseconds(*pair) for pair in pairs) * 1e-6
        self.calibrations.book(took)

    def _read_gauge(self) -> PowerReading:
        """Return the device's clock and power, read at most every GAUGE_SECONDS."""
        now = time.monotonic()
        if self._reading is None or now - self._reading[0] >= GAUGE_SECONDS:
            self._reading = now, self._gauge.read()
        return self._reading[1]


def by_column(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return rows by column; none if there is no row."""
    return {name: [row[name] for row in rows] for name in rows[0]} if rows else {}


def machine_load() -> float | None:
    """Return the machine's load of the last minute, per processor core that this process may use; None if unknown."""
    try:
        return os.getloadavg()[0] / len(os.sched_getaffinity(0))
    except (OSError, AttributeError):
        return None


@contextmanager
def dense(loaded: LoadedModel) -> Iterator[None]:
    """Run every FFN of the model densely inside this context, as the checkpoint's own code would."""
    with ExitStack() as stack:
        for ffn in loaded.ffns:
            ffn.runs_dense = True
            stack.callback(setattr, ffn, "runs_dense", False)
        yield
