"""Read the Parquet files of a run, and nothing but these files.

The idea: readers of Parquet take folders named `layer=3` for columns (Hive partitions) unless they are told not to, so
everything that reads a file of a run opens it here, or says so to an engine of its own. Pages whose checksums were
written (`parquet_part`) are compared with these as they are read. Cost: 0.3 ms a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twell.workbench.errors import UserError, first_line

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


def open_part(path: Path) -> pq.ParquetFile:
    """Open one Parquet file, to be read in pieces. Raises OSError or pyarrow.ArrowException where it cannot be read."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(path, page_checksum_verification=True)


def read_part(path: Path, **selection: Any) -> pa.Table:
    """Read one Parquet file of a run; selection: `columns` and `filters` of pyarrow's read_table.

    Raises UserError where the file cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path, partitioning=None, page_checksum_verification=True, **selection)
    except (OSError, pa.ArrowException) as error:
        raise unreadable_part(path, error) from None


def unreadable_part(path: Path, error: Exception) -> UserError:
    """Return the UserError for a Parquet file of a run that pyarrow could not read."""
    return UserError(
        f"Expected a readable part at {path}, got {first_line(error)}: copy it again from where it was recorded, or "
        "capture anew."
    )
