"""Write a run: each part appears complete or not at all, and is written while the next batch is computed.

`RunWriter` closes a part at 2^20 tokens or after 10 seconds, whichever comes first; the caller checks `due` at the end
of a sequence, so that no sequence is ever cut in two. Rows go to one background thread, a row group at a time; a part's
files grow under temporary names, and are fsynced, renamed and only then listed in the manifest. That thread also builds
the tables that are fetched from a device first, so the caller waits for neither. At most AHEAD jobs are outstanding: a
disk that is slower than the counts slows the caller down and does not fill memory.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.checks.columns_on_disk import arrow_type
from twell.workbench.run.checks.regular_file import is_within
from twell.workbench.run.manifest import Manifest, Part
from twell.workbench.run.parquet_part import GROUP, GrowingFile, disk_error
from twell.workbench.run.part_files import LIVE
from twell.workbench.run.rank_share import RankShare
from twell.workbench.run.schema import TABLES, expand
from twell.workbench.run.store import refuse_existing

PART_TOKENS = 2**20
PART_SECONDS = 10.0
LIVE_SECONDS = 1.0  # between two versions of the rows that are shown before their part is closed
AHEAD = 4  # most unfinished jobs of the writing thread
AT_ONCE = 8  # most files of a table that are compressed beside one another
FILE_NEURONS = 2**15  # of a file, at least, where a table is split: what has fewer is written before threads have begun

Columns = Mapping[str, Any]  # of a table, by name
TableColumns = tuple[str, Columns | Callable[[], Columns]]  # the name of a table, and its columns, or what makes them


def arrow_schema(table: str, layers: int, d_ff: int, used: bool = False) -> pa.Schema:
    """Return the Arrow schema of a run's table for a model of `layers` layers with `d_ff` FFN neurons each.

    used: as in `expand`
    """
    columns = expand(TABLES[table], layers, d_ff, used)
    return pa.schema([pa.field(column.name, arrow_type(column.type), nullable=column.nullable) for column in columns])


class RunWriter:
    """Writes one run. It is called by one thread, and writes files in a thread of its own.

    folder: must not hold a run already, else UserError and nothing in it is touched; manifest: of the run, or of this
    process's share of it; resume: whether the folder holds the run of this manifest, in which case files that a crash
    left behind are removed; share: which files belong to this process, where several write to the folder.
    """

    def __init__(self, folder: Path, manifest: Manifest, resume: bool = False, share: RankShare | None = None) -> None:
        self.folder, self.manifest, self._share = Path(folder), manifest, share or RankShare()
        if not resume:
            refuse_existing(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._share.claim(self.folder)
        except OSError as error:
            raise disk_error(self.folder / manifests.FILE, error) from error
        if resume:
            self._remove_strays()
        self._publish()
        shape = (manifest.layers, manifest.d_ff, manifest.counts_used)
        self._schemas = {name: arrow_schema(name, *shape) for name in TABLES}
        self._rows: dict[str, list[pa.Table]] = {}  # by table, less than a row group each
        self._files: dict[tuple[str, int], GrowingFile] = {}  # of the open part, by table and number of the file in it
        self._number = self._part = 1 + max((part.number for part in manifest.parts), default=-1)
        self._tokens, self._opened = 0, time.monotonic()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="twell-writer")
        self._jobs: deque[Future[None]] = deque()
        self._failed, self._shown = False, -LIVE_SECONDS

    def add(self, table: str, columns: Mapping[str, Any] | pa.Table) -> None:
        """Append rows to a table of the open part.

        columns: a mapping of column name to array, or an Arrow table. They are cast to the declared types; a value that
        does not fit raises pyarrow.ArrowInvalid. Waits while AHEAD jobs are unfinished, and raises UserError if earlier
        rows could not be written.
        """
        rows = self._cast(table, columns)
        pending = self._rows.setdefault(table, [])
        pending.append(rows)
        if table == "activity":
            self._tokens += rows.num_rows
        if sum(table_rows.num_rows for table_rows in pending) >= GROUP:
            self._submit(self._write, table, self._rows.pop(table))

    def add_made(self, table: str, make: Callable[[], pa.Table]) -> None:
        """Append rows as `add` does, but let the writing thread compute them by calling `make`, which may be slow."""
        self._submit(lambda: self._write(table, [self._cast(table, make())]))

    @property
    def first(self) -> bool:
        """Return whether this process writes the tables that a run has once."""
        return self._share.rank == 0

    @property
    def due(self) -> bool:
        """Return whether the open part has reached its size or its age, so that the end of a sequence may close it."""
        return self._tokens >= PART_TOKENS or (self._tokens > 0 and time.monotonic() - self._opened >= PART_SECONDS)

    def show_timings(self, columns: Mapping[str, Any]) -> None:
        """Show readers the rows of `timings` that the open part will hold, at most every LIVE_SECONDS.

        Nothing waits for the disk: a file beside the parts is replaced, and what a crash leaves of it is not read.
        """
        now = time.monotonic()
        if not self.first or now - self._shown < LIVE_SECONDS or len(self._jobs) >= AHEAD - 1:
            return
        self._shown = now
        self._submit(self._write_live, self._cast("timings", columns))

    def close_part(self, tables: Callable[[], Iterable[TableColumns]] = tuple, **updates: Any) -> None:
        """Close the open part, and set fields of the manifest with it.

        tables: a function that returns further rows of the part, called in the writing thread; updates: values of the
        manifest's fields by name
        """
        for table in list(self._rows):
            self._submit(self._write, table, self._rows.pop(table))
        self._submit(self._close, self._number, tables, updates)
        self._number += 1
        self._tokens, self._opened = 0, time.monotonic()

    def finish(
        self, status: str = manifests.COMPLETE, tables: Callable[[], Iterable[TableColumns]] = tuple, **updates: Any
    ) -> None:
        """Write all remaining rows, wait for them, and set the manifest's status and other fields with them."""
        try:
            self.close_part(tables, status=status, **updates)
            self.drain()
            (self.folder / LIVE).unlink(missing_ok=True)
        finally:
            self._pool.shutdown(cancel_futures=True)
        self._share.release()

    def abandon(self) -> None:
        """Give up the open part and mark the run as interrupted, if the disk still allows it."""
        self._failed = True
        self._pool.shutdown(cancel_futures=True)
        for file in self._files.values():
            file.discard()
        self.manifest.status = manifests.INTERRUPTED
        try:
            self._publish()
        finally:
            self._share.release()

    def drain(self) -> None:
        """Wait until the writing thread has finished all jobs. Raises UserError if rows could not be written."""
        while self._jobs:
            self._jobs.popleft().result()

    def _submit(self, job: Callable[..., None], *arguments: Any) -> None:
        while self._jobs and (len(self._jobs) >= AHEAD or self._jobs[0].done()):
            self._jobs.popleft().result()
        self._jobs.append(self._pool.submit(self._unless_failed, job, *arguments))

    def _cast(self, table: str, columns: Mapping[str, Any] | pa.Table) -> pa.Table:
        schema = self._schemas[table]
        if not isinstance(columns, pa.Table):
            arrays = [_array(columns[f.name], f.type) for f in schema]
            columns = pa.Table.from_arrays(arrays, schema=schema)
        return columns.select(schema.names).cast(schema)

    # ---- in the writing thread

    def _unless_failed(self, job: Callable[..., None], *arguments: Any) -> None:
        """Run a job unless an earlier one failed: nothing more is written then, so no part appears without its rows."""
        if self._failed:
            return
        try:
            job(*arguments)
        except BaseException:
            self._failed = True
            raise

    def _write(self, table: str, rows: list[pa.Table], file: int = 0) -> None:
        joined = pa.concat_tables(rows)
        if not joined.num_rows:
            return
        if (table, file) not in self._files:
            number = f"{file}-" * (file > 0) + f"{self._part:05d}"
            part = f"{table}/{self._share.prefix}-{number}.parquet"
            path = self.folder / (f"{table}.parquet" if TABLES[table].single_file else part)
            self._files[table, file] = GrowingFile(path, self._schemas[table])
        self._files[table, file].write(joined)

    def _write_side_by_side(self, makes: Mapping[str, list[Callable[[], Columns]]]) -> None:
        """Write the rows that functions make, by table and in their order: all tables at once, long ones as several
        files."""

        def write(table: str, file: int, some: list[Callable[[], Columns]]) -> None:
            for make in some:
                self._write(table, [self._cast(table, make())], file)

        jobs = []
        for table, functions in makes.items():
            files = max(1, min(AT_ONCE, usable_cores(), len(functions) * self.manifest.d_ff // FILE_NEURONS))
            cuts = [len(functions) * file // files for file in range(files + 1)]
            jobs += [(table, file, functions[a:b]) for file, (a, b) in enumerate(pairwise(cuts))]
        with ThreadPoolExecutor(max(1, min(AT_ONCE + len(makes), len(jobs)))) as pool:
            list(pool.map(lambda job: write(*job), jobs))

    def _write_live(self, rows: pa.Table) -> None:
        temporary = self.folder / f"{LIVE}.tmp"
        try:
            pq.write_table(rows, temporary, write_page_checksum=True)
            os.replace(temporary, self.folder / LIVE)
        except OSError as error:
            raise disk_error(self.folder / LIVE, error) from error

    def _close(self, number: int, tables: Callable[[], Iterable[TableColumns]], updates: Mapping[str, Any]) -> None:
        makes: dict[str, list[Callable[[], Columns]]] = {}
        for table, columns in tables():
            makes.setdefault(table, []).append(columns if callable(columns) else partial(dict, columns))
        self._write_side_by_side(makes)
        order = {table: place for place, table in enumerate(TABLES)}  # not that in which threads came to begin them
        files = dict(sorted(self._files.items(), key=lambda entry: (entry[0][1], order[entry[0][0]])))
        self._part = number + 1
        with ThreadPoolExecutor(max(1, len(files))) as pool:  # each waits for the disk
            closed = list(pool.map(GrowingFile.close, files.values()))
        parts = [
            Part(table, str(file.path.relative_to(self.folder)), file.rows, *size_and_sha256)
            for ((table, _), file), size_and_sha256 in zip(files.items(), closed, strict=True)
        ]
        self._files, manifest = {}, self.manifest
        written = {table: file for (table, _), file in files.items()}
        replaced = [part for part in manifest.parts if TABLES[part.table].cumulative and part.table in written]
        manifest.parts = [part for part in manifest.parts if part not in replaced] + parts
        for name, value in updates.items():
            setattr(manifest, name, value)
        if "activity" in written:
            manifest.tokens += written["activity"].rows
            manifest.sequences += written["sequences"].rows if "sequences" in written else 0
        self._publish()
        for part in replaced:
            (self.folder / part.file).unlink(missing_ok=True)

    def _publish(self) -> None:
        try:
            self._share.publish(self.folder, self.manifest)
        except OSError as error:
            raise disk_error(self.folder / manifests.FILE, error) from error

    def _remove_strays(self) -> None:
        """Remove files of tables that the manifest does not list. Raises UserError for a table's folder that is a
        link."""
        for stray in (LIVE, f"{LIVE}.tmp"):
            (self.folder / stray).unlink(missing_ok=True)
        listed, folder = {self.folder / part.file for part in self.manifest.parts}, self.folder
        for name in TABLES:
            if not is_within(folder / name, folder):
                raise UserError(
                    f"Expected files of the run itself in {folder / name}, got a link to elsewhere: put the folder in "
                    "its place, or choose another --out."
                )
            for path in [*(folder / name).glob("*"), *folder.glob(f"{name}.parquet*")]:
                if path not in listed and self._share.written(path) and not path.is_dir():
                    path.unlink()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    """Return an Arrow array of the declared type; values that are masked become null, NaN stays NaN."""
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, np.ma.MaskedArray):
        mask = np.ma.getmaskarray(values)
        return pa.array(values.filled(0).astype(values.dtype), type=kind, mask=mask)
    return pa.array(values, type=kind)
