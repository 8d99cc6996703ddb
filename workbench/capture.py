"""Capture: a model reads text, and what its FFN neurons do goes to disk while it reads.

The idea: text is tokenised ahead in a thread of its own, batches of whole sequences run one after another, and while
the device works on one the host writes the one before. Counts are reduced on the device; a token costs a few bytes of
copy and of disk. Sums stay on the device until their part of the run closes.

A batch in which a value was not finite runs once more with those tokens left out of the neuron sums, so that every
table covers the same tokens. Ctrl-C and SIGTERM stop at the end of a batch: what was counted is kept and the run is
marked `interrupted`. So does text that cannot be read further, and a full disk keeps the parts that are whole.

    twell capture data/demo-model --text builtin:passages --out runs/passages
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from rich.console import Console

from twell.workbench import doctor, schema
from twell.workbench.errors import UserError
from twell.workbench.forward import Batch, Counted, Inputs, batches, forward
from twell.workbench.manifest import COMPLETE, INTERRUPTED, Manifest
from twell.workbench.models import CONTEXT, LoadedModel, load
from twell.workbench.options import CaptureOptions
from twell.workbench.progress import Bar, Interrupt, expected_tokens, outcome, plan
from twell.workbench.sources import Source
from twell.workbench.store import Run, open_run
from twell.workbench.sums import Sums
from twell.workbench.text import Sequence, documents, sequences
from twell.workbench.timing import Timings
from twell.workbench.vocabulary import special_ids, vocabulary
from twell.workbench.writer import RunWriter, refuse_existing

T = TypeVar("T")
Texts = Generator[Batch, None, None]
AHEAD = 4  # batches tokenised before they are needed


def capture(options: CaptureOptions) -> Run:
    """Record a run. Nothing is written before the model is loaded and the first text is read.

    Raises UserError, and KeyboardInterrupt when stopped; the run written until then stays readable.
    """
    for name in ("tokens", "seq_len", "batch_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"Expected --{name.replace('_', '-')} of at least 1, got {value}.")
    refuse_existing(options.out)
    opened = [Source(name) for name in options.text]
    loaded = load(options.model, options.revision, options.device, kernel=options.kernel)
    return record(loaded, options, opened)


def record(loaded: LoadedModel, options: CaptureOptions, sources: list[Source]) -> Run:
    """`capture` with a model that is loaded already."""
    with closing(read_batches(loaded, options, sources)) as texts:
        first = next(texts, None)
        if first is None:
            raise UserError(f"Expected a token of text in {', '.join(options.text)}, got none: give other text.")
        return _record(loaded, options, sources, first, texts)


def _record(loaded: LoadedModel, options: CaptureOptions, sources: list[Source], first: Batch, texts: Texts) -> Run:
    unreadable: list[UserError] = []
    console = Console(highlight=False, soft_wrap=True)
    total = expected_tokens(loaded.tokenizer, sources, options.tokens)
    console.print(plan(loaded, options, total))
    recorder = Recorder(loaded, RunWriter(options.out, new_manifest(loaded, options)), options)
    try:
        with Interrupt() as interrupt, Bar(total, console) as bar:
            for batch in chain([first], _until_unreadable(texts, unreadable)):
                recorder.step(batch)
                bar.advance(recorder.fresh_tokens, recorder.nnz_mean)
                if interrupt.asked:
                    break
            texts.close()  # nobody reads the sources any more
            recorder.finish(INTERRUPTED if interrupt.asked or unreadable else COMPLETE, sources)
    except BaseException:
        recorder.rescue()
        raise
    run = open_run(options.out)
    console.print(outcome(run, recorder.nnz_mean))
    if unreadable:
        raise unreadable[0]
    if interrupt.asked:
        raise KeyboardInterrupt
    return run


class Recorder:
    """Runs batches through the model and hands what they counted to the writer, one batch behind the device."""

    def __init__(self, loaded: LoadedModel, writer: RunWriter, options: CaptureOptions) -> None:
        self.loaded, self.writer, self.options = loaded, writer, options
        self.timings = Timings(loaded, options.timings, options.loss)
        self._text: dict[str, dict[str, Any]] = {}  # by source: documents, sequences, tokens
        self._began = time.monotonic()
        self._in_flight: tuple[Batch, Counted] | None = None
        self._sums: Sums | None = None
        self._part_tokens = 0  # unflagged tokens of the open part
        self._nnz_sum = self._tokens = self._unflagged = self._loss_tokens = self.fresh_tokens = 0
        self._loss_sum = 0.0
        writer.add("vocab", vocabulary(loaded.tokenizer))

    @property
    def nnz_mean(self) -> float:
        """Over the unflagged tokens so far, and all layers."""
        return self._nnz_sum / max(1, self._unflagged * self.loaded.layers)

    def step(self, batch: Batch) -> None:
        """Give a batch to the device, then write the one before it."""
        inputs, options = Inputs.of(batch, self.loaded.device), self.options
        with self.timings.of(batch) as on_layer:
            counted = forward(self.loaded, inputs, probes=options.probes, loss=options.loss, on_layer=on_layer)
        before, self._in_flight = self._in_flight, (batch, counted)
        self.fresh_tokens = 0
        if before is not None:
            self._write(*before)

    def finish(self, status: str, sources: list[Source]) -> None:
        """Write what is left, and set what the manifest can only say at the end."""
        if self._in_flight is not None:
            self._write(*self._in_flight)
            self._in_flight = None
        self._flush()
        self.writer.finish(
            status,
            seconds=time.monotonic() - self._began,
            loss_sum=self._loss_sum,
            loss_tokens=self._loss_tokens,
            text=[source.manifest() | self._text.get(source.name, {}) for source in sources],
        )

    def rescue(self) -> None:
        """Mark the run interrupted, with the parts that are whole already; never raises."""
        with suppress(Exception):
            self.writer.abandon()

    @torch.inference_mode()
    def _write(self, batch: Batch, counted: Counted) -> None:
        counted.wait()
        flags = batch.flags
        finite = counted.finite.numpy()
        if not finite.all():
            flags = flags | ~finite * np.uint8(schema.FLAG_NOT_FINITE)
            inputs = Inputs.of(batch, self.loaded.device, flags)
            counted = forward(self.loaded, inputs, probes=self.options.probes, loss=self.options.loss)
            counted.wait()
        nnz = counted.nnz.numpy()
        counts = dict(zip(schema.nnz_columns(len(nnz)), nnz.astype(schema.nnz_type(self.loaded.d_ff)), strict=True))
        keys = {"sequence": batch.sequence, "position": batch.position, "token_id": batch.token_id}
        phase = np.full(len(flags), schema.PREFILL, dtype=np.uint8)
        self.writer.add(
            "activity", keys | {"phase": phase, "flags": flags, "loss": self._losses(batch, counted)} | counts
        )
        self.writer.add("sequences", self._sequences(batch))
        if self._sums is None:
            self._sums = counted.sums
        else:
            self._sums.merge(counted.sums)
        plain = flags == 0
        self._part_tokens += int(plain.sum())
        self._unflagged += int(plain.sum())
        self._nnz_sum += int(nnz[:, plain].sum(dtype=np.int64))
        self.fresh_tokens = len(flags)
        if self.writer.due:
            self._flush()
            self.writer.close_part()

    def _losses(self, batch: Batch, counted: Counted) -> np.ma.MaskedArray:
        """float16 [tokens], masked where there is no next token or no finite loss; adds to the run's sum."""
        losses = np.full(len(batch.predicts), np.nan, dtype=np.float32)
        if counted.loss is not None:
            losses[batch.predicts] = counted.loss.numpy()
        known = np.isfinite(losses)
        self._loss_sum += float(losses[known].sum(dtype=np.float64))
        self._loss_tokens += int(known.sum())
        return np.ma.MaskedArray(np.where(known, losses, 0).astype(np.float16), mask=~known)

    def _sequences(self, batch: Batch) -> dict[str, Any]:
        for sequence in batch.sequences:
            seen = self._text.setdefault(sequence.source, {"documents": 0, "sequences": 0, "tokens": 0})
            seen["documents"] += sequence.start == 0
            seen["sequences"] += 1
            seen["tokens"] += len(sequence.ids)
        return {
            "sequence": np.arange(batch.first, batch.first + len(batch.sequences), dtype=np.int32),
            "document": [sequence.document for sequence in batch.sequences],
            "start": [sequence.start for sequence in batch.sequences],
            "source": [sequence.source for sequence in batch.sequences],
            "tokens": batch.lengths,
        }

    def _flush(self) -> None:
        """Sums and timings of the open part to the writer."""
        if self._sums is not None:
            for table, columns in self._sums.tables(self._part_tokens):
                self.writer.add(table, columns)
        if self.timings.rows:
            names = self.timings.rows[0]
            self.writer.add("timings", {name: [row[name] for row in self.timings.rows] for name in names})
        self._sums, self._part_tokens, self.timings.rows = None, 0, []


def new_manifest(loaded: LoadedModel, options: CaptureOptions) -> Manifest:
    """What is known of the run before it begins. It names no path but those that were typed to name the text."""
    choice = loaded.choice(options.batch_tokens)
    layout = loaded.layout
    return Manifest(
        name=options.out.name,
        model=loaded.describe(),
        tokenizer={"name": loaded.name, "vocab_size": len(loaded.tokenizer)},
        nnz_definition=loaded.nnz_definition,
        dtype=loaded.dtype,
        device=doctor.device_name(loaded.device),
        driver=doctor.driver(loaded.device),
        kernel={"name": choice.kernel, "reason": choice.reason},
        layout={"tile": layout.tile, "compression": layout.compression, "slots": layout.slots},
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        text=[{"source": name} for name in options.text],
        options={name: value for name, value in asdict(options).items() if name != "out"}
        | {"model": loaded.name, "seq_len": sequence_length(loaded, options.seq_len)},
        versions=doctor.versions(),
    )


def sequence_length(loaded: LoadedModel, asked: int | None) -> int:
    """Tokens of the longest sequence: as asked, or the model's context, at most CONTEXT."""
    if asked is not None and asked > loaded.context:
        raise UserError(
            f"Expected --seq-len of at most {loaded.context}, the context of {loaded.name} (max_position_embeddings), "
            f"got {asked}: lower it."
        )
    return asked or min(loaded.context, CONTEXT)


def read_batches(loaded: LoadedModel, options: CaptureOptions, sources: list[Source]) -> Texts:
    """The text in batches, tokenised ahead."""
    texts = sequences(documents(sources), loaded.tokenizer, sequence_length(loaded, options.seq_len))
    if options.tokens is not None:
        texts = _first(texts, options.tokens)
    return _ahead(batches(texts, options.batch_tokens, special_ids(loaded.tokenizer)))


def _first(texts: Iterator[Sequence], tokens: int) -> Iterator[Sequence]:
    """The sequences up to so many tokens in all; the last one is cut to fit."""
    for sequence in texts:
        yield replace(sequence, ids=sequence.ids[:tokens])
        tokens -= len(sequence.ids)
        if tokens <= 0:
            return


def _ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """The same items, made in another thread some time before they are asked for."""
    with ThreadPoolExecutor(1, thread_name_prefix="twell-text") as pool:
        made = deque(pool.submit(next, items, None) for _ in range(AHEAD))
        while (item := made.popleft().result()) is not None:
            made.append(pool.submit(next, items, None))
            yield item


def _until_unreadable(texts: Iterator[Batch], errors: list[UserError]) -> Iterator[Batch]:
    """The batches up to the first text that cannot be read; the error is put into `errors`."""
    try:
        yield from texts
    except UserError as error:
        errors.append(error)
