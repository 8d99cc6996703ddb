"""Keep what sequences read until they end, and make of it the batch that a capture would have run.

The idea: a `Read` is one forward pass: its rows, their sequences, and their counts on the way to the host. The passes
over one cache are a `Group`. A sequence ends with its cache, or with the call that has none; its tokens are then put
in order, as if they had gone through the model at once. A beam that branches off a sequence is a sequence of its own
from there on: every token that the model reads is one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twell.workbench.capturing.examples import lists
from twell.workbench.capturing.firings import uniform_draws
from twell.workbench.capturing.forward import Counted
from twell.workbench.capturing.layer_sums import LayerSums
from twell.workbench.run.schema import nnz_type
from twell.workbench.text.batches import Batch
from twell.workbench.text.sequences import Sequence

SOURCE = "watch"  # the text source of a run that a watch records


@dataclass(frozen=True)
class ReadBatch(Batch):
    """Sequences that other code had the model read; unlike a Batch's, they may begin later than at position 0."""

    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # int32 [tokens]
    phases: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint8))  # uint8 [tokens]

    @property
    def position(self) -> np.ndarray:
        return self.positions

    @property
    def phase(self) -> np.ndarray:
        return self.phases

    @property
    def predicts(self) -> np.ndarray:
        sequence = self.sequence
        return np.append(sequence[1:] == sequence[:-1], False)


@dataclass
class Read:
    """One forward pass of n rows.

    numbers: int32 [sequences, columns], the run's number of each row's sequence; column: of its first one
    ids: int32 [n]; real: bool [n], None: all; phase: uint8 [columns]; counted: over all n rows
    fired: (layer, row, neuron, value) of each layer whose firings are kept
    loss: float32 [n], of the next token, NaN where it is not known; None: of none
    ahead: rows, and their losses, of tokens that the next call read
    """

    numbers: np.ndarray
    column: int
    ids: Tensor
    real: Tensor | None
    phase: np.ndarray
    counted: Counted
    fired: list[tuple[int, Tensor, Tensor, Tensor]] = field(default_factory=list)
    loss: Tensor | None = None
    ahead: list[tuple[list[int], Tensor]] = field(default_factory=list)

    def losses(self) -> Tensor:
        """Return the loss of the next token at each row, float32 [n]; NaN where it is not known."""
        loss = torch.full(self.ids.shape, torch.nan) if self.loss is None else self.loss.clone()
        for rows, values in self.ahead:
            loss[rows] = values
        return loss


@dataclass
class Ahead:
    """A call's predictions of the first tokens of the next one.

    numbers: int32 [rows], of its sequences, -1 where its last column is padding; logits: [rows, vocabulary], at the
    last column; read: the call's rows, None: not kept; columns: how many it had
    """

    numbers: np.ndarray
    logits: Tensor
    read: Read | None
    columns: int


@dataclass
class Branch:
    """A sequence that begins where another goes on without it: after a fork of beams, or a cut of its cache."""

    parent: int | None  # the number of the sequence that its context is, up to `column`
    column: int
    document: int
    start: int = 0  # position of its first token, where there is no parent in the group


class Group:
    """Sequences that one cache holds, or that one call without a cache read."""

    def __init__(self, numbers: np.ndarray, documents: np.ndarray, column: int = 0) -> None:
        """numbers: int32 [rows of the batch], or [rows, columns] where rows hold several sequences

        column: how many columns the cache held before
        """
        self.numbers, self.columns, self.begun_at = numbers, column, column
        self.branches = {
            int(number): Branch(None, column, int(document), column)
            for number, document in zip(*(np.unique(one) for one in (numbers, documents)), strict=True)
        }
        self.over: Tensor | None = None  # bool [rows]: sequences that ended within `generate`
        self.reads: list[Read] = []
        self.sums: LayerSums | None = None
        self.ahead: Ahead | None = None  # what the last call predicts, where losses are asked for
        self.closed = False
        self.waits = False  # whether it is among those whose rows are to be handed on

    @property
    def rows(self) -> int:
        """Rows that wait to be written, padding included."""
        return sum(read.ids.numel() for read in self.reads)

    def add(self, read: Read, sums: LayerSums | None) -> None:
        """Add a forward pass, and its sums."""
        self.reads.append(read)
        if sums is not None:
            if self.sums is None:
                self.sums = sums
            else:
                self.sums.merge(sums)

    def reorder(self, index: list[int], fresh: Iterator[int]) -> None:
        """Have row i go on from row index[i]; the first that goes on from a row keeps its sequence, others get a number
        of `fresh`."""
        taken: set[int] = set()
        numbers = []
        for row in index:
            number = int(self.numbers[row])
            if number in taken:
                parent, number = number, next(fresh)
                self.branches[number] = self._branch(parent, self.columns)
            taken.add(number)
            numbers.append(number)
        self.numbers = np.array(numbers, dtype=np.int32)
        if self.over is not None:
            self.over = self.over[torch.tensor(index, device=self.over.device)]

    def cut(self, columns: int, fresh: Iterator[int]) -> None:
        """Have every row go on from an earlier column."""
        numbers = []
        for number in self.numbers.tolist():
            numbers.append(next(fresh))
            self.branches[numbers[-1]] = self._branch(number, columns)
        self.numbers, self.columns = np.array(numbers, dtype=np.int32), columns

    def _branch(self, number: int, column: int) -> Branch:
        """Return a sequence that goes on from a column of another's context: from the one that read up to there."""
        while column < self.branches[number].column and (parent := self.branches[number].parent) is not None:
            number = parent
        return Branch(number, column, self.branches[number].document)

    def batch(
        self, number: int, special: np.ndarray, d_ff: int, share: float = 1.0
    ) -> tuple[ReadBatch, Counted, Fired] | None:
        """Return all tokens read so far as a batch with its counts and firings; None if there are none.

        number: of the batch; special: the tokenizer's special ids; d_ff: of the model
        share: of the tokens whose firings are kept. Waits for the counts.
        """
        tokens = _Tokens.of(self.reads)
        if not len(tokens.sequence):
            return None
        positions = self._positions(tokens)
        begins = np.flatnonzero(np.diff(tokens.sequence, prepend=-1))
        sequences = tuple(
            Sequence(self.branches[int(tokens.sequence[begin])].document, SOURCE, int(positions[begin]), ids)
            for begin, ids in zip(begins, np.split(tokens.ids, begins[1:]), strict=True)
        )
        numbers = tokens.sequence[begins]
        batch = ReadBatch(
            number, numbers, sequences, special, number, int(numbers[0]), positions=positions, phases=tokens.phase
        )
        fired = Fired(self.reads, tokens, positions, d_ff, share)
        return batch, tokens.counted(self.reads, self.sums), fired

    def _positions(self, tokens: _Tokens) -> np.ndarray:
        """Return the position of each token in its context, int32 [tokens]; tokens are sorted by sequence."""
        begins = np.flatnonzero(np.diff(tokens.sequence, prepend=-1))
        spans = dict(zip(tokens.sequence[begins].tolist(), np.split(tokens.column, begins[1:]), strict=True))

        starts: dict[int, int] = {}  # by number: the position of its first token
        for number, branch in self.branches.items():  # each after its parent
            starts[number] = branch.start
            if branch.parent is not None:
                read = spans.get(branch.parent, np.empty(0))
                starts[number] = starts[branch.parent] + int(np.searchsorted(read, branch.column))
        lengths = np.diff(begins, append=len(tokens.sequence))
        running = np.arange(len(tokens.sequence)) - np.repeat(begins, lengths)
        first = np.array([starts[number] for number in tokens.sequence[begins].tolist()])
        return (running + np.repeat(first, lengths)).astype(np.int32)

    def restart(self, fresh: Iterator[int], lengths: dict[int, int]) -> None:
        """Forget what was written; what follows is of new sequences, which begin where the others ended.

        lengths: positions by number that the sequences written had
        """
        branches, numbers = {}, []
        for number in self.numbers.tolist():
            numbers.append(next(fresh))
            branch = self.branches[number]
            branches[numbers[-1]] = Branch(None, self.columns, branch.document, lengths.get(number, branch.start))
        self.numbers, self.branches = np.array(numbers, dtype=np.int32), branches
        self.reads, self.sums = [], None


@dataclass
class _Tokens:
    """The tokens of several passes, by sequence and then as they were read; row: among the rows of all passes."""

    sequence: np.ndarray
    column: np.ndarray
    ids: np.ndarray
    phase: np.ndarray
    row: np.ndarray

    @classmethod
    def of(cls, reads: list[Read]) -> _Tokens:
        columns: list[list[np.ndarray]] = [[], [], [], [], []]
        first = 0
        for read in reads:
            read.counted.wait()
            rows, wide = read.numbers.shape
            real = np.ones(rows * wide, bool) if read.real is None else read.real.numpy()
            numbers, phase = read.numbers.ravel(), np.tile(read.phase, rows)
            column = np.tile(np.arange(read.column, read.column + wide), rows)
            row = np.arange(first, first + rows * wide)
            for each, values in zip(columns, (numbers, column, read.ids.numpy(), phase, row), strict=True):
                each.append(values[real])
            first += rows * wide
        sequence, column, ids, phase, row = (np.concatenate(each) if each else np.empty(0, int) for each in columns)
        order = np.argsort(sequence, kind="stable")
        return cls(
            sequence[order].astype(np.int32), column[order], ids[order].astype(np.int32), phase[order], row[order]
        )

    def counted(self, reads: list[Read], sums: LayerSums | None) -> Counted:
        """Return the counts of these tokens."""
        index = torch.from_numpy(self.row)
        nnz = torch.cat([read.counted.nnz for read in reads], 1)[:, index]
        finite = torch.cat([read.counted.finite for read in reads])[index]
        used = [read.counted.used for read in reads if read.counted.used is not None]
        loss = None
        if any(read.loss is not None or read.ahead for read in reads):
            loss = torch.cat([read.losses() for read in reads])[index[:-1]][
                torch.from_numpy(self.sequence[1:] == self.sequence[:-1])
            ]
        sums = sums or LayerSums(None, None, None)
        return Counted(nnz, finite, loss, sums, None, torch.cat(used, 1)[:, index] if used else None)


class Fired:
    """The single firings of a group's tokens, where they were kept."""

    def __init__(self, reads: list[Read], tokens: _Tokens, positions: np.ndarray, d_ff: int, share: float) -> None:
        self._reads, self._tokens, self._positions, self._kind = reads, tokens, positions, nnz_type(d_ff)
        self._share = share

    def commit(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of the run's `fired` table, a dict for each layer."""
        tokens, first = self._tokens, 0
        keys = (torch.from_numpy(one.astype(np.int64)) for one in (tokens.sequence, self._positions))
        kept = np.flatnonzero((uniform_draws(*keys) < self._share).numpy())  # as a capture draws them
        by_layer: dict[int, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        for read in self._reads:
            for layer, row, neuron, value in read.fired:
                by_layer.setdefault(layer, []).append((row.numpy() + first, neuron.numpy(), value.numpy()))
            first += read.ids.numel()
        rank = np.full(first, -1)
        rank[tokens.row[kept]] = np.arange(len(kept))
        most = torch.finfo(torch.float16).max
        for layer, pieces in by_layer.items():
            rows, neurons, values = (np.concatenate(one) for one in zip(*pieces, strict=True))
            index = rank[rows]
            order = np.flatnonzero(index >= 0)[np.argsort(index[index >= 0], kind="stable")]
            lengths = np.bincount(index[order], minlength=len(kept))
            yield {
                "sequence": tokens.sequence[kept],
                "position": self._positions[kept],
                "layer": np.full(len(kept), layer),
                "neuron": lists(neurons[order].astype(self._kind), lengths),
                "value": lists(np.minimum(values[order], most).astype(np.float16), lengths),
            }
