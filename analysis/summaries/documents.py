"""Tell which document each sequence belongs to: the clusters that standard errors and intervals are taken over.

    documents = read_documents(run)
    documents.of_rows(sequence)      cluster, unit and origin of each row

The tokens of one document are not independent, and neither are its sequences: dealt into different groups, they would
make every interval too narrow. So a cluster is a document, and its replicate is its number modulo 20. Where a source
has under FEW documents, those longer than BLOCK sequences are cut into blocks of that many consecutive sequences, since
a few clusters of unequal length tell no error. Sequences of which no document is known are taken in such blocks too.
Cost: 10 ms for 10 000 sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

REPLICATES = 20
BLOCK = 16  # consecutive sequences of a long document
FEW = 40  # documents of a source, from which each is a cluster however long it is
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
    block = np.where(few, (sequence - sequence[first][number]) // BLOCK, 0)
    cut = np.unique(source[few & (lengths[number] > BLOCK)])
    _, opening, cluster = np.unique(number * 2**32 + block, return_index=True, return_inverse=True)
    in_order = np.argsort(np.argsort(opening))
    shown = names if len(names) <= MOST_SOURCES else [*names[: MOST_SOURCES - 1], FURTHER]
    return Documents(
        sequence=sequence,
        cluster=in_order[cluster],
        unit=document + block,
        source=np.minimum(source, len(shown) - 1),
        opens=start == 0,
        names=tuple(shown),
        cut=tuple(names[index] for index in cut),
    )
