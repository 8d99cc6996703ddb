"""Write a Parquet file that grows by row groups and appears complete or not at all.

The idea: it is written under a temporary name, then fsynced, hashed and renamed. A crash leaves a temporary file that
nothing reads. Cost: the memory of a row group, however long the file becomes.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests

COMPRESSION, COMPRESSION_LEVEL = "zstd", 3
GROUP = 2**17  # rows of a row group, at most


class GrowingFile:
    """One file of a part. Every method raises UserError where the disk refuses to write.

    path: the file's final name; schema: of its rows
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.rows = path, 0
        self._temporary = path.with_name(path.name + ".tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = pq.ParquetWriter(
                self._temporary,
                schema,
                compression=COMPRESSION,
                compression_level=COMPRESSION_LEVEL,
                use_dictionary=dictionary_columns(schema),
                write_page_checksum=True,
            )
        except OSError as error:
            raise disk_error(path, error) from error

    def write(self, rows: pa.Table) -> None:
        """Append rows, as row groups of their own."""
        self.rows += rows.num_rows
        try:
            self._writer.write_table(rows, row_group_size=GROUP)
        except OSError as error:
            raise disk_error(self.path, error) from error

    def close(self) -> tuple[int, str]:
        """Move the file to its final name; return its size in bytes and its sha256."""
        try:
            self._writer.close()
            digest = hashlib.sha256()
            with open(self._temporary, "rb+") as file:
                while block := file.read(1 << 20):
                    digest.update(block)
                size = file.tell()
                os.fsync(file.fileno())
            os.replace(self._temporary, self.path)
        except OSError as error:
            raise disk_error(self.path, error) from error
        manifests.sync_folder(self.path.parent)
        return size, digest.hexdigest()

    def discard(self) -> None:
        """Remove the temporary file. Never raises."""
        try:
            self._writer.close()
        except OSError:
            pass
        finally:
            self._temporary.unlink(missing_ok=True)


def dictionary_columns(schema: pa.Schema) -> list[str]:
    """Return the paths of a file's columns that are written with a dictionary: all but those of float32 and float64.

    Looking up each of an example's 33 values took a third of the time, and saved no room; few of the others repeat.
    """
    columns = {f"{f.name}.list.element" if pa.types.is_list(f.type) else f.name: f.type for f in schema}
    kinds = {name: kind.value_type if pa.types.is_list(kind) else kind for name, kind in columns.items()}
    return [name for name, kind in kinds.items() if kind not in (pa.float32(), pa.float64())]


def disk_error(path: Path, error: OSError) -> UserError:
    """Return the UserError for a file that the disk refused."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space" in str(error):
        return UserError(
            f"Expected room for {path.name} in {path.parent}, the disk is full: free some space and capture again; "
            "the parts already written stay readable."
        )
    return UserError(
        f"Expected to write {path}, got {error.strerror or error}: choose a folder that can be written to."
    )
