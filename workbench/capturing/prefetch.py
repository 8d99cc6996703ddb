"""Read the text of a capture in batches, tokenised ahead in a thread of its own.

Cost: the tokenizer's, beside the device's work; AHEAD batches are in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from twell.workbench.capturing.distributed import Ranks
from twell.workbench.errors import UserError
from twell.workbench.models.load import CONTEXT, LoadedModel
from twell.workbench.options import CaptureOptions
from twell.workbench.text.batches import Batch, batches
from twell.workbench.text.sequences import Sequence, documents, sequences
from twell.workbench.text.sources import Source
from twell.workbench.text.vocabulary import special_ids

T = TypeVar("T")
BatchStream = Generator[Batch, None, None]
AHEAD = 4  # batches tokenised before they are needed


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
    loaded: LoadedModel, options: CaptureOptions, sources: list[Source], ranks: Ranks | None = None
) -> BatchStream:
    """Return the text in batches, tokenised ahead; with `ranks`, only the batches of this rank."""
    texts = sequences(documents(sources), loaded.tokenizer, prompt_length(loaded, options))
    if options.tokens is not None:
        texts = _first(texts, options.tokens)
    in_batches = batches(texts, options.batch_tokens, special_ids(loaded.tokenizer), options.generate)
    return _ahead(in_batches if ranks is None else (batch for batch in in_batches if ranks.runs(batch.window)))


def _first(texts: Iterator[Sequence], tokens: int) -> Iterator[Sequence]:
    """Yield the sequences of the first `tokens` tokens; the last one is cut to fit."""
    for sequence in texts:
        yield replace(sequence, ids=sequence.ids[:tokens])
        tokens -= len(sequence.ids)
        if tokens <= 0:
            return


def _ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """Yield the same items, made in another thread up to AHEAD items before they are needed."""
    with ThreadPoolExecutor(1, thread_name_prefix="twell-text") as pool:
        pending = deque(pool.submit(next, items, None) for _ in range(AHEAD))
        while (item := pending.popleft().result()) is not None:
            pending.append(pool.submit(next, items, None))
            yield item
