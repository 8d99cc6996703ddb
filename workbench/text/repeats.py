"""Mark tokens in a context that was read before: the same SAME_CONTEXT tokens, up to and with the token itself.

The idea: a table of SLOTS contexts, each in the place that its hash names; a later context takes the place of another.
Sequences go through it in the order of the text, so the marks depend on the text alone, however it is cut into batches
and whichever process runs them. A context is remembered for some SLOTS tokens, and two contexts of one hash of 64 bits
are taken for one.

Cost: 32 MB, and about 0.1 µs a token, in the thread that tokenises.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from twell.workbench.run.schema import SAME_CONTEXT
from twell.workbench.text.sequences import Sequence

SLOTS = 2**22
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


class Repeats:
    """The contexts that were read lately."""

    def __init__(self) -> None:
        self._table = np.zeros(SLOTS, dtype=np.uint64)

    def mark(self, ids: np.ndarray) -> np.ndarray:
        """Return bool [tokens]: whether each token of the next sequence, by its ids, is in a context read before."""
        hashes = context_hashes(ids)
        slots = hashes >> np.uint64(64 - SLOTS.bit_length() + 1)
        repeated = self._table[slots] == hashes
        first = np.zeros(len(ids), dtype=bool)
        first[np.unique(hashes, return_index=True)[1]] = True
        self._table[slots] = hashes  # of several in one place the last one stays
        return repeated | ~first


def context_hashes(ids: np.ndarray) -> np.ndarray:
    """Return uint64 [tokens], never 0: a hash of each one's last SAME_CONTEXT tokens, or of all so far."""
    words = ids.astype(np.uint64) + np.uint64(1)
    hashes = np.zeros(len(ids), dtype=np.uint64)
    for back in range(min(SAME_CONTEXT, len(ids)) - 1, -1, -1):
        hashes *= _ODD
        hashes[back:] += words[: len(ids) - back]
    hashes = (hashes ^ (hashes >> np.uint64(29))) * _MIX
    return (hashes ^ (hashes >> np.uint64(32))) | np.uint64(1)


def marked(sequences: Iterable[Sequence]) -> Iterator[Sequence]:
    """Yield the same sequences, in the order of the text, with the marks of their tokens."""
    repeats = Repeats()
    for sequence in sequences:
        yield replace(sequence, repeated=repeats.mark(sequence.ids))
