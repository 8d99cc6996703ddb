"""Tell which document each sequence belongs to: the clusters that standard errors and intervals are taken over.

    documents = read_documents(run)
    documents.of_rows(sequence, position)   cluster, unit and origin of each row
    split = split_documents(run.parts("activity"), (), documents)
    split.clusters["part-00001.parquet"]    the clusters of that part that other parts hold too
    split.home["part-00001.parquet"]        those that it reads whole, from all parts, some at a time

The tokens of one document are not independent, and neither are its sequences: dealt into different groups, they would
make every interval too narrow. So a cluster is a document, and its replicate is its number modulo 20. Where a source
has under FEW documents, those longer than BLOCK sequences are cut into blocks of that many consecutive sequences, since
a few clusters of unequal length tell no error. Sequences of which no document is known are taken in such blocks too.

Sums of squares over documents add up over parts only if each document is summed in one piece. So a part leaves out the
rows of documents that lie in several, and each of these is read whole by one of the parts that hold it (`part_rows`).
Ranks that capture together deal a document's sequences among their parts, so these documents are shared out evenly.
Cost: 10 ms for 10 000 sequences; of each part the footer, and one column where it may share a document.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from twell.workbench.errors import Missing
from twell.workbench.run.part_files import open_part
from twell.workbench.run.store import Run

REPLICATES = 20
BLOCK = 16  # consecutive sequences of a long document
FEW = 40  # documents of a source, from which each is a cluster however long it is
MOST_ROWS = 3 * 2**19  # of whole documents that a part reads at a time
MOST_SOURCES = 64  # told apart in a summary; any further ones are counted as one
LATER, START, CUT, UNKNOWN = range(4)  # place: after position 0; position 0 of a document; of its next sequence
FURTHER = "further sources"


@dataclass(frozen=True)
class Documents:
    """The sequences whose document is known, ascending.

    sequence, cluster (from 0, in the order of the text), unit (its replicate is unit modulo 20), source (an index into
    `names`), opens (whether the sequence begins its document): all [sequence]; names: of sources; cut: names of the
    sources whose long documents are cut.
    """

    sequence: NDArray
    cluster: NDArray
    unit: NDArray
    source: NDArray
    opens: NDArray
    names: tuple[str, ...]
    cut: tuple[str, ...] = ()

    @classmethod
    def unknown(cls) -> Documents:
        """Return the documents of a run that does not tell them: blocks of consecutive sequences."""
        none = np.zeros(0, np.int32)
        return cls(none, none, none, none, np.zeros(0, bool), ())

    @property
    def known(self) -> bool:
        """Return whether any document is known."""
        return len(self.sequence) > 0

    def count(self, sequences: int) -> int:
        """Return the number of clusters of a run with so many sequences."""
        unknown = max(0, sequences - len(self.sequence))
        return len(np.unique(self.cluster)) + -(-unknown // BLOCK)

    def of_rows(self, sequence: NDArray, position: NDArray) -> dict[str, NDArray]:
        """Return cluster, unit, source (the last index: unknown) and place of each row, by name.

        sequence, position [row]: rows of one sequence stand together, or the result takes longer.
        """
        starts = np.flatnonzero(np.diff(sequence, prepend=sequence[:1] - 1))
        number, sizes = sequence[starts], np.diff(starts, append=len(sequence))
        if self.known:
            index = np.minimum(np.searchsorted(self.sequence, number), len(self.sequence) - 1)
            known = self.sequence[index] == number
        else:
            index, known = np.zeros(len(number), np.int64), np.zeros(len(number), bool)
        values = {
            "cluster": len(self.sequence) + number // BLOCK,
            "unit": number // BLOCK,
            "source": np.full(len(number), len(self.names), np.int32),
        }
        opens = np.full(len(number), UNKNOWN, np.uint8)
        if known.any():
            for name in values:
                values[name] = np.where(known, getattr(self, name)[index], values[name])
            opens = np.where(known, np.where(self.opens[index], START, CUT), UNKNOWN).astype(np.uint8)
        rows = {name: np.repeat(each.astype(np.int32), sizes) for name, each in values.items()}
        return {**rows, "place": np.where(position == 0, np.repeat(opens, sizes), LATER).astype(np.uint8)}


def read_documents(run: Run) -> Documents:
    """Return the documents of the run's sequences; `Documents.unknown()` where it does not tell them.

    Raises UserError where that table is damaged: every interval would be another.
    """
    try:
        rows = run.arrow("sequences", ["sequence", "document", "start", "source"])
    except Missing:
        return Documents.unknown()
    return documents_of(rows) if rows.num_rows else Documents.unknown()


def documents_of(rows: pa.Table) -> Documents:
    """Return the documents of sequences from columns sequence, document, start and source."""
    rows = rows.sort_by("sequence")
    sequence, document, start = (rows[name].to_numpy() for name in ("sequence", "document", "start"))
    encoded = rows["source"].combine_chunks().dictionary_encode()
    source, names = encoded.indices.to_numpy(), encoded.dictionary.to_pylist()
    key = source.astype(np.int64) * 2**32 + document
    _, first, number = np.unique(key, return_index=True, return_inverse=True)
    documents, lengths = np.bincount(source[first], minlength=len(names)), np.bincount(number)
    few = (documents < FEW)[source]
    order = np.argsort(number, kind="stable")  # a document's sequences may lie apart: branches of a beam search do
    rank = np.empty(len(number), np.int64)
    rank[order] = np.arange(len(number)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    block = np.where(few, rank // BLOCK, 0)
    cut = np.unique(source[few & (lengths[number] > BLOCK)])
    _, opening, cluster = np.unique(number * 2**32 + block, return_index=True, return_inverse=True)
    in_order = np.argsort(np.argsort(opening))
    named = names if len(names) <= MOST_SOURCES else [*names[: MOST_SOURCES - 1], FURTHER]
    return Documents(
        sequence=sequence,
        cluster=in_order[cluster],
        unit=document + block,
        source=np.minimum(source, len(named) - 1),
        opens=start == 0,
        names=tuple(named),
        cut=tuple(names[index] for index in cut),
    )


@dataclass(frozen=True)
class SplitDocuments:
    """Clusters that lie in several parts, by the file name of a part.

    clusters: numbers of those that the part holds rows of, ascending; home: the ones that it reads whole, as arrays of
    at most MOST_ROWS rows, or of one longer document; covered: parts whose sums are there already, which are home to
    none.
    """

    clusters: Mapping[str, NDArray] = field(default_factory=dict)
    home: Mapping[str, list[NDArray]] = field(default_factory=dict)
    covered: frozenset[str] = frozenset()

    def holders(self, clusters: NDArray, covered_only: bool = False) -> list[str]:
        """Return the parts that hold rows of any of these clusters; covered_only: among the covered ones."""
        names = self.covered & self.clusters.keys() if covered_only else self.clusters.keys()
        return sorted(name for name in names if np.isin(self.clusters[name], clusters).any())


def split_documents(files: Sequence[Path], covered: Collection[Path], documents: Documents) -> SplitDocuments:
    """Return the clusters that two or more parts hold, at least one of which is not covered.

    files: all parts of `activity`; covered: those of them whose sums are not made again; documents: of the run.
    """
    done = frozenset(path.name for path in covered)
    possible = {path: _between(*_sequence_range(path), documents) for path in files}
    shared = _in_several(possible, done)
    rows: dict[Path, tuple[NDArray, NDArray]] = {}
    for path, numbers in possible.items():
        if np.isin(numbers, shared).any():
            sequence = open_part(path).read(["sequence"])["sequence"].to_numpy()
            rows[path] = np.unique(documents.of_rows(sequence, sequence)["cluster"], return_counts=True)
    shared = _in_several({path: numbers for path, (numbers, _) in rows.items()}, done)
    sizes, clusters = np.zeros(len(shared), np.int64), {}
    for path, (numbers, count) in rows.items():
        inside = np.isin(numbers, shared)
        sizes[np.searchsorted(shared, numbers[inside])] += count[inside]
        if inside.any():
            clusters[path.name] = numbers[inside]
    return SplitDocuments(clusters, _homes(clusters, shared, sizes, done), done)


def _sequence_range(path: Path) -> tuple[int, int]:
    """Return the least and the greatest sequence of a part."""
    file = open_part(path)
    column = file.schema_arrow.names.index("sequence")
    groups = [file.metadata.row_group(number).column(column).statistics for number in range(file.num_row_groups)]
    if groups and all(statistics is not None and statistics.has_min_max for statistics in groups):
        return min(statistics.min for statistics in groups), max(statistics.max for statistics in groups)
    return _read_range(file)


def _read_range(file: pq.ParquetFile) -> tuple[int, int]:
    """Return the least and the greatest sequence of a part whose footer does not tell them; (0, -1) without rows."""
    sequence = file.read(["sequence"])["sequence"].to_numpy()
    return (int(sequence.min()), int(sequence.max())) if len(sequence) else (0, -1)


def _between(first: int, last: int, documents: Documents) -> NDArray:
    """Return the clusters of the sequences from `first` to `last`, ascending."""
    sequence = np.arange(first, last + 1)
    return np.unique(documents.of_rows(sequence, sequence)["cluster"])


def _in_several(clusters: Mapping[Path, NDArray], covered: frozenset[str]) -> NDArray:
    """Return the clusters that two or more of these parts hold, at least one of which is not covered, ascending."""
    if not clusters:
        return np.zeros(0, np.int32)
    number, parts = np.unique(np.concatenate(list(clusters.values())), return_counts=True)
    fresh = [held for path, held in clusters.items() if path.name not in covered]
    return number[(parts > 1) & np.isin(number, np.concatenate(fresh) if fresh else [])]


def _homes(
    clusters: Mapping[str, NDArray], shared: NDArray, sizes: NDArray, covered: frozenset[str]
) -> dict[str, list[NDArray]]:
    """Return, by part, the clusters that it reads whole, MOST_ROWS at a time. Those of several parts go round."""
    names = sorted(clusters.keys() - covered)
    holds = np.array([np.isin(shared, clusters[name]) for name in names], bool).reshape(len(names), len(shared))
    turn = np.arange(len(shared)) % np.maximum(holds.sum(axis=0), 1)
    chosen = holds & (np.cumsum(holds, axis=0) - 1 == turn)
    homes = {}
    for name, mine in zip(names, chosen, strict=True):
        begins = np.cumsum(sizes[mine]) - sizes[mine]
        homes[name] = np.split(shared[mine], 1 + np.flatnonzero(np.diff(begins // MOST_ROWS)))
    return {name: [group for group in groups if len(group)] for name, groups in homes.items()}
