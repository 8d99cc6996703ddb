"""Record batches: run them through the model and write their counts, one batch behind the device.

A batch in which a value was not finite runs once more with those tokens left out of the sums, so that every table
covers the same tokens. Rows are written in the order of the text, as soon as no earlier one is to come, and a part is
closed at the end of a window, with what the manifest says of the tokens until then. Between two batches nothing waits
for the device but for the counts of the batch before the last; sums and examples are fetched by the thread that writes
them, which makes the vocabulary once the device has work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch

from twell.workbench.capturing.batch_size import if_it_fits, smaller_batches
from twell.workbench.capturing.firings import BatchFirings, FiringCollector
from twell.workbench.capturing.forward import Counted, Inputs, forward
from twell.workbench.capturing.generate import GenerationConfig, generate
from twell.workbench.capturing.layer_sums import LayerSums
from twell.workbench.capturing.progress import nnz_sum
from twell.workbench.capturing.timing.call_times import BatchTimes
from twell.workbench.capturing.timing.timings import Timings
from twell.workbench.models.load import LoadedModel
from twell.workbench.options import CaptureOptions
from twell.workbench.run import schema
from twell.workbench.run.store import Run
from twell.workbench.run.writer import RunWriter, TableColumns
from twell.workbench.text.batches import Batch, InOrder, split
from twell.workbench.text.sequences import Sequence
from twell.workbench.text.vocabulary import vocabulary

Ran = tuple[Batch, Counted, BatchFirings | None, BatchTimes | None]  # a batch that the device has


class Commits(Protocol):
    """Single firings of a batch; `commit` yields the rows of the `fired` table."""

    def commit(self) -> Iterable[dict[str, Any]]: ...


class ListedSource(Protocol):
    """A text source, and its entry in the manifest."""

    name: str

    def manifest(self) -> dict[str, Any]: ...


class Recorder:
    """Run batches through the model and pass their counts to the writer, one batch behind the device."""

    def __init__(self, loaded: LoadedModel, writer: RunWriter, options: CaptureOptions) -> None:
        self.loaded, self.writer, self.options = loaded, writer, options
        manifest = writer.manifest  # of a resumed run: it has the sums over the tokens so far
        known = ("documents", "sequences", "tokens")
        self._text: dict[str, dict[str, Any]] = {
            one["source"]: {name: one[name] for name in known} for one in manifest.text if "tokens" in one
        }
        self._names = [one["source"] for one in manifest.text]
        self._began = time.monotonic() - manifest.seconds
        self._collector = FiringCollector(loaded.layers, loaded.d_ff, options.examples, options.fired)
        self._in_flight: Ran | None = None
        self._window: list[Batch] = []  # batches of the open window whose counts have arrived
        self._in_order = InOrder()
        self._fired: list[pa.Table] = []
        self._sums: LayerSums | None = None
        self._nnz_sum = self.counted = self.fresh_tokens = 0  # counted: tokens of the run without a flag
        self._loss_sum, self._loss_tokens = manifest.loss_sum, manifest.loss_tokens
        run = Run(writer.folder, manifest)
        if run.has("activity"):
            self._restore_means(run)
        self._counts_values = not manifest.parts or run.has("value_bins")  # else they would not add up to its firings
        if run.has("examples"):
            self.merge_examples(run.arrow("examples"))
        timed = options.timings_share, options.loss, bool(options.generate), manifest.seconds
        self.timings = Timings(loaded, options.timings, *timed)
        self._lacks_vocabulary = writer.first and not manifest.parts
        self._most_rows: int | None = None  # of a batch, once one was too large
        self.tell: Callable[[str], None] = print

    @property
    def nnz_mean(self) -> float | None:
        """The mean nnz over the run's unflagged tokens so far and all layers; None while there is none."""
        return self._nnz_sum / (self.counted * self.loaded.layers) if self.counted else None

    def _restore_means(self, run: Run) -> None:
        """Add the tokens of a resumed run to nnz_mean."""
        tokens, total = nnz_sum(run)
        self.counted, self._nnz_sum = self.counted + tokens, self._nnz_sum + total

    def step(self, batch: Batch) -> None:
        """Start a batch on the device, then process the counts of the batch before it.

        A batch that the device's memory does not hold is split, and so are later ones.
        """
        self.fresh_tokens = 0
        waiting = split(batch, self._most_rows)
        while waiting:
            if (ran := if_it_fits(self._started, waiting[0])) is None:
                self._most_rows = smaller_batches(waiting[0], self.tell)
                waiting = [part for one in waiting for part in split(one, self._most_rows)]
                continue
            before, self._in_flight, waiting = self._in_flight, ran, waiting[1:]
            self._add_vocabulary()
            if before is not None:
                self._take(*before)
            if shown := self.timings.columns_until(ran[0], ran[3]):
                self.writer.show_timings(shown)

    def _started(self, batch: Batch, last_chance: bool = False) -> Ran:
        with self.timings.of(batch, last_chance) as times:
            return (*self._run(batch, times=times), times)

    def _add_vocabulary(self) -> None:
        """Write the vocabulary, once, where the model came with a tokenizer."""
        if self._lacks_vocabulary and self.loaded.tokenizer is not None:
            self.writer.add_made("vocab", lambda: vocabulary(self.loaded.tokenizer))
        self._lacks_vocabulary = False

    def _run(
        self, batch: Batch, flags: np.ndarray | None = None, times: BatchTimes | None = None
    ) -> tuple[Batch, Counted, BatchFirings | None]:
        options = self.options
        about: dict[str, Any] = {"probes": options.probes, "loss": options.loss, "times": times}
        if options.generate:
            config = GenerationConfig(options.generate, options.temperature, options.seed)
            batch, counted, firings = generate(
                self.loaded, batch, config, flags=flags, collector=self._collector, **about
            )
        else:
            inputs = Inputs.of(batch, self.loaded.device, flags)
            firings = self._collector.collect_from(batch, inputs)
            on_packed = None if firings is None else firings.on_packed
            counted = forward(self.loaded, inputs, on_packed=on_packed, **about)
        if firings is not None and self._counts_values:
            counted.sums.values = firings.fires
        return batch, counted, firings

    def finish(self, status: str, sources: Iterable[ListedSource]) -> None:
        """Write what is left and set the manifest's last fields. The last batch has ended its window."""
        if self._in_flight is not None:
            self._take(*self._calibrated(self._in_flight))
            self._in_flight = None
        tables, about = self._flush()
        read = [source.manifest() | self._text.get(source.name, {}) for source in sources]
        self.writer.finish(status, tables, **about | {"text": read})

    def flush(self) -> None:
        """Close the open part now, and wait until it is on disk."""
        tables, about = self._flush()
        self.writer.close_part(tables, **about)
        self.writer.drain()

    def _calibrated(self, ran: Ran) -> Ran:
        """Return the last batch and its counts; a capture that ended before its device was warm runs it once more.

        Where memory does not hold that, it goes without.
        """
        if ran[3] is None or not self.timings.calibrations.lacking:
            return ran
        batch = ran[0].given() if self.options.generate else ran[0]
        return if_it_fits(partial(self._started, last_chance=True), batch) or ran

    def merge_examples(self, examples: pa.Table) -> None:
        """Merge the `examples` table of another rank, of which the best are kept."""
        if self._collector.examples is not None:
            self._collector.examples.restore(examples, self.loaded.device)

    def rescue(self) -> None:
        """Mark the run interrupted, with the parts that are whole already; never raises."""
        with suppress(Exception):
            self.writer.abandon()

    @torch.inference_mode()
    def _take(self, batch: Batch, counted: Counted, firings: BatchFirings | None, times: BatchTimes | None) -> None:
        """Add up the counts of a batch, and write the rows that no earlier sequence is to come before."""
        counted.wait()
        if times is not None:
            self.timings.record(batch, times)
        flags = batch.flags
        finite = counted.finite.numpy()
        if not finite.all():
            flags = flags | ~finite * np.uint8(schema.FLAG_NOT_FINITE)
            _, counted, firings = self._run(batch, flags)
            counted.wait()
        rows = self._rows(batch, counted, flags)
        ready = self._in_order.add(batch, rows)
        if ready is not None:
            self._write(ready)
        self._add_up(batch, counted, firings, flags)

    @torch.inference_mode()
    def accept(self, batch: Batch, counted: Counted, firings: Commits | None = None) -> None:
        """Record a batch that other code ran, which ends its window and whose counts have arrived.

        Its sums cover its unflagged tokens; of a token that is not finite, they cover the layers before it became so.
        """
        self._add_vocabulary()
        flags = batch.flags | ~counted.finite.numpy() * np.uint8(schema.FLAG_NOT_FINITE)
        self._write(self._rows(batch, counted, flags))
        self._add_up(batch, counted, firings, flags)

    def _rows(self, batch: Batch, counted: Counted, flags: np.ndarray) -> dict[str, np.ndarray]:
        """Return the columns of `activity` for a batch."""
        kind, counts = schema.nnz_type(self.loaded.d_ff), dict[str, np.ndarray]()
        for name, layers in (("nnz", counted.nnz), ("used", counted.used)):
            if layers is not None:
                counts |= dict(zip(schema.nnz_columns(len(layers), name), layers.numpy().astype(kind), strict=True))
        keys = {"sequence": batch.sequence, "position": batch.position, "token_id": batch.token_id}
        predicted = {}
        for name, values in (("loss", counted.loss), ("entropy", counted.entropy)):
            predicted[name] = np.full(len(flags), np.nan, dtype=np.float32)
            if values is not None:
                predicted[name][batch.predicts] = values.numpy()
        return keys | {"phase": batch.phase, "flags": flags} | predicted | counts

    def _add_up(self, batch: Batch, counted: Counted, firings: Commits | None, flags: np.ndarray) -> None:
        """Add a batch to the sums of the open part."""
        self._window.append(batch)
        if self._sums is None:
            self._sums = counted.sums
        else:
            self._sums.merge(counted.sums)
        self._fired += [pa.table(columns) for columns in (firings.commit() if firings is not None else ())]
        plain = flags == 0
        self.counted += int(plain.sum())
        self._nnz_sum += int(counted.nnz.numpy().sum(0, dtype=np.int64)[plain].sum())
        self.fresh_tokens += len(flags)
        if batch.ends:
            self._end_window()

    def _write(self, rows: dict[str, np.ndarray]) -> None:
        """Write rows of `activity`, which are in the order of the text, and add up their loss."""
        known = np.isfinite(rows["loss"])
        self._loss_sum += float(rows["loss"][known].sum(dtype=np.float64))
        self._loss_tokens += int(known.sum())
        loss = np.ma.MaskedArray(np.where(known, rows["loss"], 0).astype(np.float16), mask=~known)
        entropy = np.ma.MaskedArray(rows["entropy"], mask=~known | ~np.isfinite(rows["entropy"]))
        self.writer.add("activity", rows | {"loss": loss, "entropy": entropy})

    def _end_window(self) -> None:
        """Write a window's sequences and sampled tokens, and close the part if it is due."""
        batches, self._window = self._window, []
        if self._fired:
            in_order = [(name, "ascending") for name in ("sequence", "position", "layer")]
            self.writer.add("fired", pa.concat_tables(self._fired).sort_by(in_order))
            self._fired = []
        numbers = np.concatenate([batch.numbers for batch in batches])
        sequences = [sequence for batch in batches for sequence in batch.sequences]
        order = np.argsort(numbers)
        self.writer.add("sequences", self._sequences(numbers[order], [sequences[index] for index in order]))
        if self.writer.due:
            tables, about = self._flush()
            self.writer.close_part(tables, **about)

    def _sequences(self, numbers: np.ndarray, sequences: list[Sequence]) -> dict[str, Any]:
        for sequence in sequences:
            seen = self._text.setdefault(sequence.source, {"documents": 0, "sequences": 0, "tokens": 0})
            seen["documents"] += sequence.start == 0
            seen["sequences"] += 1
            seen["tokens"] += len(sequence.ids)
        return {
            "sequence": numbers,
            "document": [sequence.document for sequence in sequences],
            "start": [sequence.start for sequence in sequences],
            "source": [sequence.source for sequence in sequences],
            "tokens": [len(sequence.ids) for sequence in sequences],
        }

    def _flush(self) -> tuple[Callable[[], Iterator[TableColumns]], dict[str, Any]]:
        """Return a function that makes the open part's tables, and the manifest's fields for all tokens until now.

        The writing thread calls the function, because sums and examples must come from the device first.
        """
        sums, timings = self._sums, self.timings.columns()
        kept = self._collector.examples
        examples = list if kept is None else kept.tables()

        def tables() -> Iterator[TableColumns]:
            if sums is not None:
                yield from sums.tables()
            if timings:
                yield "timings", timings
            yield from (("examples", make) for make in examples())

        self._sums, self.timings.rows = None, []
        seconds = time.monotonic() - self._began
        about = {"seconds": seconds, "loss_sum": self._loss_sum, "loss_tokens": self._loss_tokens}
        text = [{"source": name} | self._text.get(name, {}) for name in self._names]
        return tables, about | {"text": text}
