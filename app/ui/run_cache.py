"""A run as the server holds it: what a page asks for again and again is read from disk once.

Parts never change once the manifest lists them, so what was read of one is kept under its checksum. A run that is still
being recorded gains a part every ten seconds, and only that one is read; the vocabulary is read once a run, not once a
page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from twell.workbench.run.store import Run

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

TIMINGS = "timings"
TIMING_PARTS = 8640  # of a few kilobytes each: a day of recording
VOCABULARIES = 4  # of a few megabytes each


class Kept(Run):
    """A run that reads each part of its timings, and its vocabulary, once."""

    def arrow(self, table: str = "activity", columns: Sequence[str] | None = None) -> pa.Table:
        """A table as Arrow, every part joined; `columns` names those wanted."""
        if table != TIMINGS or not self.has(table):
            return super().arrow(table, columns)
        import pyarrow as pa

        pieces = [_timings(Alone(self, part)) for part in self.manifest.parts if part.table == table]
        whole = pa.concat_tables(pieces)
        return whole if columns is None else whole.select(list(columns))

    @cached_property
    def vocab(self) -> pd.DataFrame:
        """The vocabulary by token id: bytes, text, special. Shared: not to be changed."""
        there = [part for part in self.manifest.parts if part.table == "vocab"]
        return _vocabulary(Alone(self, there[0])) if len(there) == 1 else super().vocab


def kept(run: Run) -> Kept:
    """The same run, held."""
    return Kept(run.path, run.manifest)


class Alone:
    """One part of a run (of its manifest's `parts`), as a key: parts of the same place and checksum are the same."""

    def __init__(self, run: Run, part: Any) -> None:
        self.key = (run.path.absolute(), part.file, part.sha256)
        self.run = Run(run.path, replace(run.manifest, parts=[part]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alone) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=TIMING_PARTS)
def _timings(alone: Alone) -> pa.Table:
    return alone.run.arrow(TIMINGS)


@lru_cache(maxsize=VOCABULARIES)
def _vocabulary(alone: Alone) -> pd.DataFrame:
    return alone.run.vocab
