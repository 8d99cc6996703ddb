"""Writing a run: parts that appear whole or not at all, while the next batch is computed.

`RunWriter` buffers rows in memory and closes a part at 2^20 tokens or after 10 seconds, whichever comes first; the
caller asks `due` at the end of a sequence, so that no sequence is ever cut in two. A closed part goes to one
background thread: each of its files is written under a temporary name, fsynced and renamed, and only then listed
in the manifest. At most one part is in flight, so a slow disk slows the caller down and never grows memory.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from twell.workbench import manifest as manifests
from twell.workbench.errors import UserError
from twell.workbench.manifest import Manifest, Part
from twell.workbench.schema import TABLES, expand
from twell.workbench.store import refuse_existing

PART_TOKENS = 2**20
PART_SECONDS = 10.0
COMPRESSION, COMPRESSION_LEVEL = "zstd", 3

_TYPES = {
    "list<float32>": pa.list_(pa.float32()),
    "list<uint16>": pa.list_(pa.uint16()),
    "list<float16>": pa.list_(pa.float16()),
    "bool": pa.bool_(),
}


def arrow_schema(table: str, layers: int, d_ff: int) -> pa.Schema:
    """The Arrow schema of a run's table for a model with this many layers and FFN neurons."""
    columns = expand(TABLES[table], layers, d_ff)
    kinds = {c.name: _TYPES.get(c.type) or pa.type_for_alias(c.type) for c in columns}
    return pa.schema([pa.field(c.name, kinds[c.name], nullable=c.nullable) for c in columns])


def write_parquet(path: Path, table: pa.Table) -> tuple[int, str]:
    """Write one file whole or not at all. Returns its size in bytes and its sha256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        pq.write_table(table, temporary, compression=COMPRESSION, compression_level=COMPRESSION_LEVEL)
        digest = hashlib.sha256()
        with open(temporary, "rb+") as file:
            while block := file.read(1 << 20):
                digest.update(block)
            size = file.tell()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise disk_error(path, error) from error
    manifests.sync_folder(path.parent)
    return size, digest.hexdigest()


def disk_error(path: Path, error: OSError) -> UserError:
    """One sentence for what a disk can refuse."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space" in str(error):
        return UserError(
            f"Expected room for {path.name} in {path.parent}, the disk is full: free some space and capture again; "
            "the parts already written stay readable."
        )
    return UserError(
        f"Expected to write {path}, got {error.strerror or error}: choose a folder that can be written to."
    )


class RunWriter:
    """Records one run. Not for several threads; the thread that writes files is its own.

    `folder` must not hold a run already: UserError, and nothing in it is touched. With `resume` it holds the run of
    this manifest, and what is no part of it is removed: files that a crash left behind.
    """

    def __init__(self, folder: Path, manifest: Manifest, resume: bool = False) -> None:
        self.folder, self.manifest = Path(folder), manifest
        if resume:
            _remove_strays(self.folder, manifest)
        else:
            refuse_existing(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            manifests.write(self.folder, manifest)
        except OSError as error:
            raise disk_error(self.folder / manifests.FILE, error) from error
        self._schemas = {name: arrow_schema(name, manifest.layers, manifest.d_ff) for name in TABLES}
        self._rows: dict[str, list[pa.Table]] = {}
        self._number = 1 + max((part.number for part in manifest.parts), default=-1)
        self._tokens, self._opened = 0, time.monotonic()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="twell-writer")
        self._in_flight: Future[None] | None = None

    def add(self, table: str, columns: Mapping[str, Any] | pa.Table) -> None:
        """Append rows to a table of the open part: a mapping of column name to array, or an Arrow table.

        Columns are cast to the declared types; a value that does not fit raises pyarrow.ArrowInvalid.
        """
        schema = self._schemas[table]
        if not isinstance(columns, pa.Table):
            arrays = [_array(columns[f.name], f.type) for f in schema]
            columns = pa.Table.from_arrays(arrays, schema=schema)
        rows = columns.select(schema.names).cast(schema)
        if rows.num_rows:
            self._rows.setdefault(table, []).append(rows)
        if table == "activity":
            self._tokens += rows.num_rows

    @property
    def due(self) -> bool:
        """Whether the open part has reached its size or its age. Ask at the end of a sequence."""
        return self._tokens >= PART_TOKENS or (self._tokens > 0 and time.monotonic() - self._opened >= PART_SECONDS)

    def close_part(self, **updates: Any) -> None:
        """Hand what was added since the last part to the writing thread, and what the manifest is to say with it.

        Waits for the part before it. Raises UserError if that one could not be written.
        """
        self._wait()
        tables = {name: pa.concat_tables(rows) for name, rows in self._rows.items()}
        number, self._number = self._number, self._number + 1
        self._rows, self._tokens, self._opened = {}, 0, time.monotonic()
        if tables:
            self._in_flight = self._pool.submit(self._write_part, number, tables, updates)

    def finish(self, status: str = manifests.COMPLETE, **updates: Any) -> None:
        """Write what is left, wait for it, and set the manifest's status and any other of its fields."""
        try:
            self.close_part(**updates)
            self._wait()
        finally:
            self._pool.shutdown()
        for name, value in updates.items():
            setattr(self.manifest, name, value)
        self.manifest.status = status
        try:
            manifests.write(self.folder, self.manifest)
        except OSError as error:
            raise disk_error(self.folder / manifests.FILE, error) from error

    def abandon(self) -> None:
        """Give up the open part and mark what was written as interrupted, if the disk still lets us."""
        self._pool.shutdown()
        self.manifest.status = manifests.INTERRUPTED
        try:
            manifests.write(self.folder, self.manifest)
        except OSError as error:
            raise disk_error(self.folder / manifests.FILE, error) from error

    def _wait(self) -> None:
        if self._in_flight is not None:
            future, self._in_flight = self._in_flight, None
            future.result()

    def _write_part(self, number: int, tables: dict[str, pa.Table], updates: Mapping[str, Any]) -> None:
        parts: list[Part] = []
        for name, table in tables.items():
            file = f"{name}.parquet" if TABLES[name].single_file else f"{name}/part-{number:05d}.parquet"
            size, digest = write_parquet(self.folder / file, table)
            parts.append(Part(name, file, table.num_rows, size, digest))
        gone = [part for part in self.manifest.parts if TABLES[part.table].whole and part.table in tables]
        self.manifest.parts = [part for part in self.manifest.parts if part not in gone] + parts
        for name, value in updates.items():
            setattr(self.manifest, name, value)
        if "activity" in tables:
            self.manifest.tokens += tables["activity"].num_rows
            self.manifest.sequences += tables["sequences"].num_rows if "sequences" in tables else 0
        try:
            manifests.write(self.folder, self.manifest)
        except OSError as error:
            raise disk_error(self.folder / manifests.FILE, error) from error
        for part in gone:
            (self.folder / part.file).unlink(missing_ok=True)


def _remove_strays(folder: Path, manifest: Manifest) -> None:
    kept = {folder / part.file for part in manifest.parts}
    for path in (path for name in TABLES for path in [*(folder / name).glob("*"), *folder.glob(f"{name}.parquet*")]):
        if path not in kept:
            path.unlink()


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    """An Arrow array of the declared type; float NaN becomes null only where values are masked."""
    if isinstance(values, pa.Array):
        return values
    if isinstance(values, np.ma.MaskedArray):
        mask = np.ma.getmaskarray(values)
        return pa.array(values.filled(0).astype(values.dtype), type=kind, mask=mask)
    return pa.array(values, type=kind)
