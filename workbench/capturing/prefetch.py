"""Read the text of a capture in batches, tokenised ahead in a thread of its own.

Cost: the tokenizer's, beside the device's work; AHEAD batches are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

from twell.workbench.capturing.distributed import Ranks
from twell.workbench.errors import UserError
from twell.workbench.models.load import CONTEXT, LoadedModel
from twell.workbench.options import CaptureOptions
from twell.workbench.text.batches import Batch, batches
from twell.workbench.text.repeats import marked
from twell.workbench.text.sequences import PIECE, PIECE_SECONDS, Sequence, Tokenizing, documents, sequences
from twell.workbench.text.sources import TextSource
from twell.workbench.text.vocabulary import special_ids

T = TypeVar("T")
BatchStream = Generator[Batch, None, None]
AHEAD = 4  # batches tokenised before they are needed
POLL_SECONDS = 0.5


def sequence_length(loaded: LoadedModel, requested: int | None) -> int:
    """Return the longest sequence in tokens: as requested, or the model's context, at most CONTEXT."""
    if requested is not None and requested > loaded.context:
        raise UserError(
            f"Expected --seq-len of at most {loaded.context}, the context of {loaded.name} (max_position_embeddings), "
            f"got {requested}: lower it."
        )
    return requested or min(loaded.context, CONTEXT)


def prompt_length(loaded: LoadedModel, options: CaptureOptions) -> int:
    """Return the longest sequence that is read, in tokens; with --generate, a sequence less what is generated."""
    longest = sequence_length(loaded, options.seq_len)
    if options.generate >= longest:
        raise UserError(
            f"Expected --generate of less than the {longest} tokens of a sequence (--seq-len, or the context of "
            f"{loaded.name}), of which a prompt needs some, got {options.generate}: generate fewer, or raise --seq-len."
        )
    return longest - options.generate


def read_batches(
    loaded: LoadedModel, options: CaptureOptions, sources: list[TextSource], ranks: Ranks | None = None
) -> BatchStream:
    """Return the text in batches, tokenised ahead; with `ranks`, only the batches of this rank."""
    tokenizing = Tokenizing()
    texts = sequences(documents(sources), loaded.tokenizer, prompt_length(loaded, options), tokenizing)
    if options.tokens is not None:
        texts = _first(texts, options.tokens)
    if options.examples:
        texts = marked(texts)
    in_batches = batches(texts, options.rows_of_batch, special_ids(loaded.tokenizer), options.generate)
    if ranks is not None:
        in_batches = (batch for batch in in_batches if ranks.runs(batch.window))
    return _ahead(in_batches, tokenizing)


def _first(texts: Iterator[Sequence], tokens: int) -> Iterator[Sequence]:
    """Yield the sequences of the first `tokens` tokens; the last one is cut to fit."""
    for sequence in texts:
        yield replace(sequence, ids=sequence.ids[:tokens])
        tokens -= len(sequence.ids)
        if tokens <= 0:
            return


def _ahead(items: Iterator[T], tokenizing: Tokenizing) -> Generator[T, None, None]:
    """Yield the same items, made in another thread up to AHEAD items before they are needed.

    Raises UserError if the tokenizer does not end; its thread is then left behind, as nothing can stop it.
    """
    requests: SimpleQueue[bool] = SimpleQueue()
    results: SimpleQueue[Callable[[], T | None]] = SimpleQueue()
    thread = Thread(target=_serve, args=(items, requests, results), name="twell-text", daemon=True)
    thread.start()
    for _ in range(AHEAD):
        requests.put(True)
    try:
        while (item := _wait(results, tokenizing)()) is not None:
            requests.put(True)
            yield item
    finally:
        requests.put(False)
        while thread.is_alive() and not tokenizing.is_endless:
            thread.join(timeout=POLL_SECONDS)


def _serve(items: Iterator[T], requests: SimpleQueue[bool], results: SimpleQueue[Callable[[], T | None]]) -> None:
    """Make an item for each request, until one is False; put functions that return it, None at the end, or raise."""
    while requests.get():
        future: Future[T | None] = Future()
        try:
            future.set_result(next(items, None))
        except BaseException as error:
            future.set_exception(error)
        results.put(future.result)


def _wait(results: SimpleQueue[Callable[[], T | None]], tokenizing: Tokenizing) -> Callable[[], T | None]:
    """Return the next result. Raises UserError once the tokenizer has been at work for longer than any text takes."""
    while True:
        try:
            return results.get(timeout=POLL_SECONDS)
        except Empty:
            if tokenizing.is_endless:
                raise UserError(
                    f"Expected a tokenizer that takes {PIECE:,} characters in less than {PIECE_SECONDS} s, got one "
                    "that does not end: correct the patterns in its tokenizer.json."
                ) from None
