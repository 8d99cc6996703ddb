"""Read documents from sources, and cut them into token sequences, as streams.

The idea: a document is read in pieces of at most PIECE characters, so that a file of any size takes a few megabytes of
memory; the ends of pieces depend on the text alone. Cost: that of the tokenizer, which gets BATCH characters at a time
so that its threads have work: about 200 000 tokens a second and core.

    sources = [TextSource("builtin:passages"), TextSource("notes.jsonl")]
    for sequence in sequences(documents(sources), tokenizer, seq_len=1024): ...
    manifest["text"] = [source.manifest() for source in sources]
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING

import numpy as np

from twell.workbench.errors import UserError, first_line
from twell.workbench.text.given import GivenTexts
from twell.workbench.text.sources import TextSource, builtins

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PIECE = 1 << 16  # characters, the most in one piece of a document
BATCH = PIECE * min(32, max(8, os.cpu_count() or 1))  # characters tokenised at a time: a piece for each core
BATCH_PIECES = 4096  # at most, as each takes memory of its own however short it is

# Where a piece may end, best first: between two lines of text, before a word, after a line break. Byte-level
# tokenizers split at the first two anyway, so a cut there changes no token. Greedy: the last such border.
_BORDERS = [re.compile(p, re.DOTALL) for p in (r".*\S\n(?=\S)", r".+(?= [^\W\d_])", r".*\n")]


PIECE_SECONDS = 20  # that a piece may take, of a tenth of a second; a pattern that takes longer does not end


class Tokenizing:
    """A tokenizer's work on one batch, seen from another thread: whether it takes so long that it will not end."""

    def __init__(self) -> None:
        self._until: float | None = None

    @property
    def is_endless(self) -> bool:
        until = self._until
        return until is not None and time.monotonic() > until

    @contextmanager
    def working(self, characters: int) -> Iterator[None]:
        """Measure a block that tokenises so many characters. Raises UserError for any error of the tokenizer in it."""
        rounds = -(-characters // (PIECE * (os.cpu_count() or 1)))
        self._until = time.monotonic() + PIECE_SECONDS * max(1, rounds)
        try:
            yield
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            if isinstance(error, KeyboardInterrupt | GeneratorExit | SystemExit):
                raise
            raise UserError(
                f"Expected a tokenizer that takes the text, got an error of it ({first_line(error)}): correct the "
                "patterns in its tokenizer.json."
            ) from None
        finally:
            self._until = None


@dataclass(frozen=True)
class Document:
    """A document, or the next piece of one: its pieces follow each other, with the same source and number."""

    source: str
    number: int  # index in its source
    text: str


@dataclass(frozen=True)
class Sequence:
    """One forward context: a document, or its next `seq_len` tokens without overlap."""

    document: int  # index in its source
    source: str
    start: int  # position of its first token in the document, in tokens
    ids: np.ndarray  # int32 [tokens]
    repeated: np.ndarray | None = None  # bool: of the first tokens, whether `repeats.py` marks them; None: unmarked


def documents(sources: Iterable[str | TextSource]) -> Iterator[Document]:
    """Return the documents of all sources, in order, in pieces (see Document).

    A text file is one document, however many blank lines it has. So is a line of a `.jsonl` file (its field `text`, or
    its `messages`), a passage, a topic of Python's help, and all docstrings of one module of its library. Every name is
    checked before the first document is returned. Raises UserError for a wrong name, a source named twice, and a source
    without text.
    """
    opened = [source if isinstance(source, TextSource) else TextSource(source) for source in sources]
    if not opened:
        raise UserError(f"Expected at least one text source, got none: name a file, or {builtins()}.")
    names = [source.name for source in opened]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"Expected every text source once, got {name} more than once: name it once.")
    return chain.from_iterable(map(_documents, opened))


def _documents(source: TextSource) -> Iterator[Document]:
    """Yield one source's documents in pieces. Raises UserError at the end if all of them are blank."""
    blank = True
    for number, chunks in enumerate(source.read()):
        for text in _pieces(chunks):
            blank = blank and text.isspace()
            yield Document(source.name, number, text)
    if blank:
        where = "what is given" if isinstance(source, GivenTexts) else source.name
        raise UserError(f"Expected text in {where}, got no document that has any: give another source.")


def _pieces(chunks: Iterable[str]) -> Iterator[str]:
    """Yield the same text in pieces of at most PIECE characters, none of them empty."""
    text = ""
    for chunk in chunks:
        text += chunk
        start = 0
        while len(text) - start > PIECE:
            window = text[start : start + PIECE]
            ends = (match.end() for border in _BORDERS if (match := border.match(window)))
            end = start + next(ends, PIECE)
            yield text[start:end]
            start = end
        text = text[start:]
    if text:
        yield text


def sequences(
    documents: Iterable[Document],
    tokenizer: PreTrainedTokenizerFast,
    seq_len: int,
    tokenizing: Tokenizing | None = None,
) -> Iterator[Sequence]:
    """Tokenise each document, and cut it into sequences of `seq_len` tokens without overlap, the last one shorter.

    A document of one piece gets exactly the ids of `tokenizer(text)`, special tokens included. The pieces of a longer
    document are tokenised by themselves, with the special tokens once, so ids can differ from those of the whole text
    at the borders of pieces, and only there. With byte-level BPE they are the same for text that has words or lines; a
    metaspace tokenizer (Llama 2) adds its leading space to each piece. Documents without a token of text are left out.
    Raises UserError for a `seq_len` below 1, and for a tokenizer that fails.

    tokenizing: notes when the tokenizer is at work
    """
    if seq_len < 1:
        raise UserError(f"Expected sequences of at least 1 token, got {seq_len}: raise --seq-len.")
    tokenizing = tokenizing or Tokenizing()
    with tokenizing.working(1):
        before, after = _special_tokens(tokenizer)
    tokenised = groupby(_tokenised(documents, tokenizer, tokenizing), key=lambda pair: (pair[0].source, pair[0].number))
    for (source, number), pieces in tokenised:
        stream = chain(before, chain.from_iterable(ids for _, ids in pieces), after)
        start = 0
        while ids := list(islice(stream, seq_len)):
            yield Sequence(number, source, start, np.array(ids, dtype=np.int32))
            start += len(ids)


def _tokenised(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast, tokenizing: Tokenizing
) -> Iterator[tuple[Document, list[int]]]:
    """Yield pieces with their ids, without special tokens; pieces without ids are left out."""
    for batch in _batches(documents):
        texts = [piece.text for piece in batch]
        with tokenizing.working(sum(map(len, texts))):
            ids = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        yield from (pair for pair in zip(batch, ids, strict=True) if pair[1])


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Yield consecutive pieces in lists of BATCH characters or a little more, and of BATCH_PIECES at most."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if characters >= BATCH or len(batch) >= BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _special_tokens(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after a text, by those around the first text with an id."""
    for text in chain("a", tokenizer.get_vocab()):  # not every vocabulary has an a: one of nucleotides may not
        probe = tokenizer(text, return_special_tokens_mask=True)
        ids, special = probe["input_ids"], probe["special_tokens_mask"]
        if 0 in special:
            return ids[: special.index(0)], ids[len(ids) - special[::-1].index(0) :]
    return [], []
