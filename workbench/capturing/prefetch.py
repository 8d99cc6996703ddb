"""The text of a capture in batches, tokenised ahead in a thread of its own."""

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
Texts = Generator[Batch, None, None]
AHEAD = 4  # batches tokenised before they are needed


def sequence_length(loaded: LoadedModel, asked: int | None) -> int:
    """Tokens of the longest sequence: as asked, or the model's context, at most CONTEXT."""
    if asked is not None and asked > loaded.context:
        raise UserError(
            f"Expected --seq-len of at most {loaded.context}, the context of {loaded.name} (max_position_embeddings), "
            f"got {asked}: lower it."
        )
    return asked or min(loaded.context, CONTEXT)


def prompt_length(loaded: LoadedModel, options: CaptureOptions) -> int:
    """Tokens of the longest sequence that is read: less than it may have, where it is gone on with."""
    longest = sequence_length(loaded, options.seq_len)
    if options.generate >= longest:
        raise UserError(
            f"Expected --generate of less than the {longest} tokens of a sequence (--seq-len, or the context of "
            f"{loaded.name}), of which a prompt needs some, got {options.generate}: generate fewer, or raise --seq-len."
        )
    return longest - options.generate


def read_batches(
    loaded: LoadedModel, options: CaptureOptions, sources: list[Source], ranks: Ranks | None = None
) -> Texts:
    """The text in batches, tokenised ahead; of several ranks, those of this one."""
    texts = sequences(documents(sources), loaded.tokenizer, prompt_length(loaded, options))
    if options.tokens is not None:
        texts = _first(texts, options.tokens)
    found = batches(texts, options.batch_tokens, special_ids(loaded.tokenizer), options.generate)
    return _ahead(found if ranks is None else (batch for batch in found if ranks.runs(batch.window)))


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


def until_unreadable(texts: Iterator[Batch], errors: list[UserError]) -> Iterator[Batch]:
    """The batches up to the first text that cannot be read; the error is put into `errors`."""
    try:
        yield from texts
    except UserError as error:
        errors.append(error)
