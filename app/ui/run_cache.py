"""Runs as the server holds them: what pages read again and again is read from disk once.

A part never changes once the manifest lists it, so its content is cached under its checksum. A run that is still being
recorded gains a part every ten seconds, and only the new one is read. The vocabulary is read once for each run.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twell.workbench.run.manifest import FILE, RECORDING
from twell.workbench.run.part_files import live_timings
from twell.workbench.run.store import Run, open_run

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

WITHOUT_DAMAGED = "--without-damaged"  # among the dashboard's arguments, after the folder
TIMINGS = "timings"
TIMING_PARTS = 8640  # parts of a few kilobytes each: a day of recording
VOCABULARIES = 4  # of a few megabytes each


class CachedRun(Run):
    """A run that reads each part of its timings, and its vocabulary, once."""

    def arrow(self, table: str = "activity", columns: Sequence[str] | None = None) -> pa.Table:
        """Return a table as Arrow, all its parts joined, with the given columns or all of them."""
        if table != TIMINGS or not self.has(table):
            return super().arrow(table, columns)
        import pyarrow as pa

        tables = [_timings(PartKey(self, part)) for part in self.manifest.parts if part.table == table]
        joined = pa.concat_tables(tables, promote_options="permissive")
        return joined if columns is None else joined.select(list(columns))

    @cached_property
    def vocab(self) -> pd.DataFrame:
        """The vocabulary by token id: bytes, text, special. It is shared: do not change it."""
        parts = [part for part in self.manifest.parts if part.table == "vocab"]
        return _vocabulary(PartKey(self, parts[0])) if len(parts) == 1 else super().vocab


class LiveRun(CachedRun):
    """A run that is being recorded, with the timings that its next part will hold.

    Its other tables are those of the parts; its figures are drawn once and not cached.
    """

    @cached_property
    def _live(self) -> pa.Table | None:
        return live_timings(self.path) if self.manifest.status == RECORDING else None

    def has(self, table: str) -> bool:
        """Return whether the run holds any row of a table."""
        return super().has(table) or (table == TIMINGS and self._live is not None)

    def arrow(self, table: str = "activity", columns: Sequence[str] | None = None) -> pa.Table:
        """Return a table as Arrow; for `timings`, followed by the rows of batches that no part has yet."""
        if table != TIMINGS or self._live is None:
            return super().arrow(table, columns)
        import pyarrow as pa
        import pyarrow.compute as pc

        rows = self._live
        if super().has(table):
            known = super().arrow(table)
            newer = pc.invert(pc.is_in(rows["batch"], known["batch"].combine_chunks()))
            rows = pa.concat_tables([known, rows.filter(newer).select(known.column_names).cast(known.schema)])
        return rows if columns is None else rows.select(list(columns))


class PartKey:
    """One part of a run as the key of a cache: parts with the same path and checksum are equal.

    Args:
        run: the run that lists the part.
        part: an entry of the manifest's `parts`.
    """

    def __init__(self, run: Run, part: Any) -> None:
        self.key = (run.path.absolute(), part.file, part.sha256)
        self.run = Run(run.path, replace(run.manifest, parts=[part]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PartKey) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@lru_cache(maxsize=TIMING_PARTS)
def _timings(part: PartKey) -> pa.Table:
    rows = part.run.arrow(TIMINGS)
    del part.run  # the cache keeps the key, which needs no manifest any more
    return rows


@lru_cache(maxsize=VOCABULARIES)
def _vocabulary(part: PartKey) -> pd.DataFrame:
    return part.run.vocab


def cached_run(run: Run) -> CachedRun:
    """Return the same run with its reads cached."""
    return CachedRun(run.path, run.manifest)


def leaves_out_damaged() -> bool:
    """Return whether the dashboard was started to leave damaged parts out, by name."""
    return WITHOUT_DAMAGED in sys.argv[2:]


def shown(run: Run) -> Run:
    """Return a run as pages show it: without its damaged parts if the dashboard was started so."""
    return cached_run(open_run(run.path, without_damaged=True)) if leaves_out_damaged() else run


def open_cached(path: Path) -> Run:
    """Open a run as it stands now. Its manifest is read again only if the file has changed since the last time.

    Raises UserError if the folder holds no run or a broken one.
    """
    if leaves_out_damaged():  # files may be damaged, or mended, while the manifest stays as it is
        return cached_run(open_run(path, without_damaged=True))
    try:
        stamp = (path / FILE).stat()
    except OSError:
        return open_run(path)  # raises the error that says what is wrong
    version = (stamp.st_ino, stamp.st_mtime_ns, stamp.st_size)
    newest = _newest(path)
    if (run := newest.get(version)) is None:
        run = cached_run(open_run(path))
        newest.clear()  # a run that is being recorded lists every part anew each time
        newest[version] = run
    return run


@lru_cache(maxsize=64)
def _newest(path: Path) -> dict[tuple[int, ...], Run]:
    """Return what holds a run as it was opened last, by its manifest's version."""
    return {}


def digest(run: Run) -> str:
    """Return 16 hexadecimal digits that change with every part that the run gains, and with its status."""
    checksums = "".join(part.sha256 for part in run.manifest.parts)
    return hashlib.sha256(f"{run.manifest.status} {run.manifest.created} {checksums}".encode()).hexdigest()[:16]
