"""Read the Parquet files of a run, and compare them with their checksums.

The idea: a file is compared with its checksum in the manifest once, and again only after it has changed (`checksum`).
Pages that were written with checksums of their own (`parquet_part`) are compared with these as they are read, unless
the file was compared as a whole that day (`checks.whole`). By default, readers of Parquet take folders named `layer=3`
for columns (Hive partitions). All code that reads a file of a run therefore opens it here, or turns that off in an
engine of its own.

Cost: 0.3 ms a file, and 0.6 to 2 s of a core for each gigabyte to hash; files are hashed in parallel.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twell.workbench.errors import UserError, first_line
from twell.workbench.run.checks.regular_file import require_regular
from twell.workbench.run.checks.whole import is_whole
from twell.workbench.run.schema import TABLES

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

ADVICE = (
    "copy it again from where it was recorded, or capture anew; `twell check` names all that is damaged, and with "
    "--without-damaged (in Python without_damaged=True) the other parts answer"
)
LIVE = "live-timings.parquet"  # in a run's folder while it is recorded, and in no manifest


TICK = 50_000_000  # ns: two changes within a tick of the clock of files may leave the same time of change


def checksum(path: Path) -> str:
    """Return a file's sha256. This process reads it again only once the file has changed, by size, time or inode.

    Raises OSError for what is no regular file, which might never end.
    """
    now = require_regular(path)
    version = (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)
    recent = time.time_ns() - now.st_ctime_ns <= TICK
    return _checksum.__wrapped__(path, version) if recent else _checksum(path, version)


@lru_cache(maxsize=2**16)
def _checksum(path: Path, version: tuple[int, ...]) -> str:
    """Return the sha256 of a file. version: changes with the file, and with it the entry in the cache."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_part(path: Path) -> pq.ParquetFile:
    """Open one Parquet file, to be read in pieces. Raises OSError or pyarrow.ArrowException where it cannot be read."""
    import pyarrow.parquet as pq

    checked = is_whole(str(path), require_regular(path))
    return pq.ParquetFile(path, page_checksum_verification=not checked)


def read_part(path: Path, **selection: Any) -> pa.Table:
    """Read one Parquet file of a run; selection: `columns` and `filters` of pyarrow's read_table.

    Raises UserError where the file cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        checked = is_whole(str(path), require_regular(path))
        return pq.read_table(path, partitioning=None, page_checksum_verification=not checked, **selection)
    except (OSError, pa.ArrowException) as error:
        raise unreadable_part(path, error) from None


def with_newer_columns(table: str, rows: pa.Table, columns: Collection[str] | None = None) -> pa.Table:
    """Return rows of a table with nulls in the columns that were declared after their part was written.

    columns: the names that were asked for; all if None
    """
    import pyarrow as pa

    for column in TABLES[table].columns:
        wanted = columns is None or column.name in columns
        if column.is_newer and wanted and column.name not in rows.column_names:
            rows = rows.append_column(column.name, pa.nulls(len(rows), pa.type_for_alias(column.type)))
    return rows if columns is None else rows.select(list(columns))


def live_timings(folder: Path) -> pa.Table | None:
    """Return the rows of `timings` that a capture has made since its last part, at most some seconds old; None if it
    has left none. They are no part of the run: a part will hold them too."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(folder / LIVE, partitioning=None, page_checksum_verification=True)
    except (OSError, pa.ArrowException):  # none, or of a capture that was killed as it wrote
        return None


def unreadable_part(path: Path, error: Exception | str) -> UserError:
    """Return the UserError for a Parquet file of a run that pyarrow could not read, or that is damaged."""
    got = error.rstrip(".") if isinstance(error, str) else first_line(error)
    return UserError(f"Expected a readable part at {path}, got {got}: {ADVICE}.")
