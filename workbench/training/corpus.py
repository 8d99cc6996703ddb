"""Tokenise training text into one flat array of ids, and choose the rows that each step reads from it.

The idea: the last share of every source is held out before it is read for any purpose, a byte-level BPE is trained on
the remaining text, and documents follow each other in one stream, each opened by `<|endoftext|>`. A row is
`seq_len + 1` neighbouring ids of that stream. The rows of a step depend on the seed and the step alone, so a training
that continues after a kill needs no other state.

Cost: the text is in memory once while it is tokenised (about 5 s for 95 MB on 16 cores, and as long again for the
BPE); after that the ids are mapped from disk, two bytes each. `twell train` runs it and keeps the ids in a work folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from twell.workbench.errors import UserError
from twell.workbench.run import locks
from twell.workbench.run.manifest import sync_file
from twell.workbench.text.sequences import documents
from twell.workbench.text.sources import TextSource, open_sources

END_OF_TEXT = "<|endoftext|>"  # opens every document; also end of sequence and padding
BATCH = 256  # pieces of text that are tokenised in parallel
TextPiece = tuple[bool, str]  # (opens a document, text)


@dataclass(frozen=True)
class Corpus:
    """A tokenised training text.

    train, heldout: token ids [n] to train on and to evaluate on; valid: ids of other texts by name; record: settings,
    sources and their checksums
    """

    tokenizer: PreTrainedTokenizerFast
    train: np.ndarray
    heldout: np.ndarray
    valid: dict[str, np.ndarray]
    record: dict[str, Any]

    @property
    def mark(self) -> int:
        return int(self.tokenizer.bos_token_id)


def prepare(
    sources: tuple[str, ...],
    folder: Path,
    *,
    vocab: int,
    holdout: float,
    bpe_megabytes: float,
    valid: tuple[str, ...] = (),
    given: tuple[Tokenizer, str, str] | None = None,
    replace: bool = False,
) -> Corpus:
    """Tokenise the sources into `folder`, or read the corpus that it has of the same text and settings.

    vocab: entries of the tokenizer; holdout: share of each source that is held out; bpe_megabytes: text that the
    tokenizer is trained on; valid: sources of other text; given: a tokenizer, the token that opens a text, and what
    tells it from others, in place of one that is trained; replace: whether another corpus in the folder gives way.
    Raises UserError where it does not.
    """
    texts = {source.name: list(_pieces(source)) for source in open_sources(sources)}
    splits = {source: _cut(pieces, holdout) for source, pieces in texts.items()}
    training = [piece for first, _, _ in splits.values() for piece in first]
    record: dict[str, Any] = {
        "vocab": vocab,
        "holdout": holdout,
        "bpe_megabytes": bpe_megabytes,
        "sources": [
            {
                "source": source_name(source),
                "sha256": _sha256(texts[source]),
                "bytes": _size(texts[source]),
                "heldout_from": heldout_from,  # bytes
            }
            for source, (_, _, heldout_from) in splits.items()
        ],
    }
    mark = END_OF_TEXT if given is None else given[1]
    record |= {} if given is None else {"tokenizer": given[2]}
    with locks.locked(folder):  # trainings that share it may begin at once
        if not _holds(folder, record, replace):
            tokenizer = train_bpe(training, vocab, bpe_megabytes) if given is None else given[0]
            tokenizer.save(str(folder / "tokenizer.json"))
            heldout_pieces = [piece for _, last, _ in splits.values() for piece in last]
            np.save(folder / "train.npy", encode(tokenizer, training, mark))
            np.save(folder / "heldout.npy", encode(tokenizer, heldout_pieces, mark))
            temporary = folder / "corpus.json.tmp"
            temporary.write_text(json.dumps(record, indent=1), encoding="utf-8")
            for name in ("tokenizer.json", "train.npy", "heldout.npy", temporary.name):
                sync_file(folder / name)
            os.replace(temporary, folder / "corpus.json")  # last: without it the folder counts as empty
    train, heldout = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("train", "heldout"))
    record = {**record, "train_tokens": len(train), "heldout_tokens": len(heldout)}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    other_texts = {source_name(source.name): encode(tokenizer, _pieces(source), mark) for source in open_sources(valid)}
    return Corpus(wrap(tokenizer, mark), train, heldout, other_texts, record)


def train_bpe(pieces: list[TextPiece], vocab: int, megabytes: float) -> Tokenizer:
    """Train a byte-level BPE of `vocab` entries on about `megabytes` of the text, spread evenly over all of it.

    Raises UserError where the text yields fewer entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    step = max(1, round(sum(len(text) for _, text in pieces) / (megabytes * 1e6)))
    tokenizer.train_from_iterator((text for _, text in pieces[::step]), trainer)
    if tokenizer.get_vocab_size() < vocab:
        raise UserError(
            f"Expected training text for a vocabulary of {vocab:,} tokens, got enough for "
            f"{tokenizer.get_vocab_size():,}: give more text, or a recipe of a smaller vocab as --config."
        )
    mark = tokenizer.token_to_id(END_OF_TEXT)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A {END_OF_TEXT} $B", special_tokens=[(END_OF_TEXT, mark)]
    )
    return tokenizer


def wrap(tokenizer: Tokenizer, mark: str = END_OF_TEXT) -> PreTrainedTokenizerFast:
    """Return a tokenizer as transformers has it, with `mark` as its special token."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=mark, eos_token=mark, pad_token=mark)


def encode(tokenizer: Tokenizer, pieces: Iterable[TextPiece], opening: str = END_OF_TEXT) -> np.ndarray:
    """Return the ids of all pieces as one array [n], with the mark before each document; uint16 if the ids fit."""
    mark = tokenizer.token_to_id(opening)
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    ids: list[np.ndarray] = []
    for batch in _batched(pieces):
        encodings = tokenizer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
        for (opens, _), encoding in zip(batch, encodings, strict=True):
            ids.append(np.array(([mark] if opens else []) + encoding.ids, dtype))
    return np.concatenate(ids) if ids else np.empty(0, dtype)


class TrainingBatches:
    """The rows of the stream that each step trains on, in a new order and from a new offset in each epoch.

    ids [n]: the stream; seq_len: tokens a row; rows: rows a step; seed: of order and offset; mark: the id that opens a
    document. Raises UserError where the stream has too few tokens for a step.
    """

    def __init__(self, ids: np.ndarray, seq_len: int, rows: int, seed: int, mark: int) -> None:
        self.ids, self.seq_len, self.rows, self.seed, self.mark = ids, seq_len, rows, seed, mark
        self.windows = len(ids) // seq_len - 2  # room for an offset below seq_len and for the last target
        self.steps = self.windows // rows
        self._epoch, self._starts = -1, np.empty(0, np.int64)
        if self.steps < 1:
            raise UserError(
                f"Expected training text for a step of {rows:,} rows of {seq_len:,} tokens, got {len(ids):,} tokens: "
                "give more text, or fewer --rows."
            )

    def batch(self, step: int) -> torch.Tensor:
        """Return the rows of a step, int64 [rows, seq_len + 1]: inputs are all columns but the last, targets all but
        the first."""
        epoch, index = divmod(step, self.steps)
        if epoch != self._epoch:
            generator = np.random.default_rng([self.seed, epoch])
            self._starts = generator.integers(self.seq_len) + self.seq_len * generator.permutation(self.windows)
            self._epoch = epoch
        starts = self._starts[index * self.rows : (index + 1) * self.rows]
        rows = self.ids[starts[:, None] + np.arange(self.seq_len + 1)].astype(np.int64)
        # A context opens with the mark, or, as a document's second context does, in the middle of its text.
        rows[::2, 0] = self.mark
        return torch.from_numpy(rows)


def in_order(ids: np.ndarray, seq_len: int, rows: int, tokens: int | None = None) -> Iterator[torch.Tensor]:
    """Yield the rows of a stream in order, int64 [<= rows, seq_len + 1], without overlap of their targets.

    tokens: how many tokens of the stream to read at most, all if None
    """
    windows = max(0, (len(ids) if tokens is None else min(len(ids), tokens + 1)) - 1) // seq_len
    for first in range(0, windows, rows):
        starts = seq_len * np.arange(first, min(first + rows, windows))
        yield torch.from_numpy(ids[starts[:, None] + np.arange(seq_len + 1)].astype(np.int64))


def unigram_loss(train: np.ndarray, heldout: np.ndarray, vocab: int) -> float:
    """Return the loss in nats a token of predicting by training frequency alone, with one added to every count."""
    counts = np.bincount(train, minlength=vocab) + 1.0
    return float(-np.log(counts / counts.sum())[heldout[1:]].mean())


def _pieces(source: TextSource) -> Iterator[TextPiece]:
    """Yield a source's text in pieces, which are cut at ends of lines where that is possible."""
    number = None
    for document in documents([source]):
        yield document.number != number, document.text
        number = document.number


def _cut(pieces: list[TextPiece], holdout: float) -> tuple[list[TextPiece], list[TextPiece], int]:
    """Return the pieces before and after the cut, and its position in bytes: the first line break past 1 - `holdout`
    of the text."""
    cut, before = int((1 - holdout) * _size(pieces)), 0
    for index, (opens, text) in enumerate(pieces):
        raw = text.encode()
        if before + len(raw) > cut:
            inside = raw.find(b"\n", cut - before) + 1 or len(raw)
            head, tail = raw[:inside].decode(), raw[inside:].decode()
            last = ([(False, tail)] if tail else []) + pieces[index + 1 :]
            return [*pieces[:index], (opens, head)], last, before + inside
        before += len(raw)
    return pieces, [], before


def _batched(pieces: Iterable[TextPiece]) -> Iterator[tuple[TextPiece, ...]]:
    iterator = iter(pieces)
    while batch := tuple(itertools.islice(iterator, BATCH)):
        yield batch


def _size(pieces: list[TextPiece]) -> int:
    return sum(len(text.encode()) for _, text in pieces)


def _sha256(pieces: list[TextPiece]) -> str:
    digest = hashlib.sha256()
    for _, text in pieces:
        digest.update(text.encode())
    return digest.hexdigest()


def source_name(source: str) -> str:
    """Return a source's name for records: that of a file without its folders, others as they are."""
    return source if source.startswith(("builtin:", "hf:")) else Path(source).name


def _holds(folder: Path, record: dict[str, Any], replace: bool) -> bool:
    """Return whether the folder has this corpus. Raises UserError where it has another that does not give way."""
    path = folder / "corpus.json"
    if not path.exists():
        return False
    recorded = json.loads(path.read_text(encoding="utf-8"))
    for name, value in record.items():
        if recorded.get(name) != value and replace:
            path.unlink()  # first: without it the folder counts as empty
            return False
        if recorded.get(name) != value:
            raise UserError(
                f"{folder} holds a corpus with {name} {recorded.get(name)}, not {value}; name another folder."
            )
    return True
