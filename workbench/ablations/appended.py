"""Append parts of a table to a run that has ended: each appears whole, with its entry in the manifest, or not at all.

A folder is locked while parts are appended, so that no other process writes to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from twell.workbench.errors import UserError
from twell.workbench.run import locks
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import RECORDING, Manifest, Part
from twell.workbench.run.parquet_part import GrowingFile, disk_error
from twell.workbench.run.schema import TABLES
from twell.workbench.run.writer import arrow_schema


@contextmanager
def appending(folder: Path) -> Iterator[None]:
    """Lock a run's folder for parts that are appended. Raises UserError where another process writes to it."""
    release = locks.claim(folder, owner := _Owner())
    if release is None:
        raise UserError(f"Expected a run that nothing else writes to in {folder}, another process does: wait for it.")
    try:
        if manifests.read(folder).status == RECORDING:
            raise UserError(f"Expected a run that has ended, {folder} was never finished: add --resume to its capture.")
        yield
    finally:
        release()
        del owner


def append(folder: Path, table: str, columns: Mapping[str, Any], **updates: Any) -> Manifest:
    """Write rows of a table as one more part, and set fields of the manifest with it; return the manifest.

    columns: arrays by name; updates: values by name of the manifest's field
    """
    manifest = manifests.read(folder)
    schema = arrow_schema(table, manifest.layers, manifest.d_ff, manifest.counts_used)
    rows = pa.Table.from_arrays(
        [pa.array(columns[f.name], type=f.type, from_pandas=False) for f in schema], schema=schema
    )
    number = 1 + max((part.number for part in manifest.parts if part.table == table), default=-1)
    name = f"{table}/part-{number:05d}.parquet"
    file = GrowingFile(folder / name, schema)
    try:
        file.write(rows)
        size, sha256 = file.close()
    except BaseException:
        file.discard()
        raise
    replaced = [part for part in manifest.parts if part.table == table and TABLES[table].cumulative]
    manifest.parts = [
        *(part for part in manifest.parts if part not in replaced),
        Part(table, name, rows.num_rows, size, sha256),
    ]
    for field, value in updates.items():
        setattr(manifest, field, value)
    try:
        manifests.write(folder, manifest)
    except OSError as error:
        raise disk_error(folder / manifests.FILE, error) from error
    for part in replaced:
        (folder / part.file).unlink(missing_ok=True)
    return manifest


class _Owner:
    """The owner of the lock on a run."""
