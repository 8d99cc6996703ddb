"""Write tables to files piece by piece; a file appears complete or not at all.

CSV and JSON have neither bytes nor half floats, and CSV has no lists: bytes are written as hexadecimal digits, half
floats as float32, lists as JSON. A JSON file is an array of records, with null for NaN, and for infinities a number
past the greatest double, which JSON can spell and readers take for one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from twell.workbench.errors import UserError, no_temporary_folder

ENCODE = json.JSONEncoder(ensure_ascii=False).encode


@contextmanager
def replacing(path: Path, ending: str = ".tmp") -> Iterator[Path]:
    """Yield a temporary path beside `path` to write to; rename it to `path` if the block succeeds.

    An existing file is replaced, and no half-written file remains. Raises UserError where the disk refuses.
    """
    temporary = path.with_name(path.name + ending)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        if sentence := no_temporary_folder(error):  # of DuckDB's, not of this file
            raise UserError(sentence) from None
        raise UserError(
            f"Expected to write {path}, got {error.strerror or error}: choose a place that can be written to."
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_table(pieces: Iterable[pa.Table], path: Path, format: str) -> int:
    """Write a table to a file and return its number of rows.

    pieces: the table, one piece at a time and at least one, so that memory does not grow with it; what producing the
    first piece raises is raised before the disk is touched. format: parquet, csv or json.
    """
    convertible = iter(pieces) if format == "parquet" else (_plain(piece, format) for piece in pieces)
    first = next(convertible)
    rows = 0
    with replacing(path) as temporary, _writer(temporary, first.schema, format) as writer:
        for piece in chain([first], convertible):
            writer.write_table(piece if piece.schema.equals(first.schema) else piece.cast(first.schema))
            rows += piece.num_rows
    return rows


class JsonWriter:
    """Writes a JSON array of records, piece by piece."""

    def __init__(self, path: Path) -> None:
        self.file, self.rows = open(path, "w", encoding="utf-8"), 0  # noqa: SIM115 - closed by __exit__

    def __enter__(self) -> JsonWriter:
        return self

    def __exit__(self, *problem: object) -> None:
        self.file.write("\n]\n" if self.rows else "[]\n")
        self.file.close()

    def write_table(self, piece: pa.Table) -> None:
        for record in piece.to_pylist():
            self.file.write(",\n" if self.rows else "[\n")
            self.file.write(_json(record))
            self.rows += 1


def _json(value: Any) -> str:
    """Return a value, a list or a record as JSON; NaN as null, infinities as a number past the greatest double."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{ENCODE(name)}: {_json(one)}' for name, one in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(_json(entry) for entry in value)}]"
    if not isinstance(value, float):
        return ENCODE(value)
    return repr(value) if math.isfinite(value) else "null" if math.isnan(value) else f"{'-' * (value < 0)}1e999"


def _writer(path: Path, schema: pa.Schema, format: str) -> pq.ParquetWriter | pa.csv.CSVWriter | JsonWriter:
    """Open a writer of pieces with this schema."""
    if format == "json":
        return JsonWriter(path)
    if format == "csv":
        return pa.csv.CSVWriter(path, schema)
    return pq.ParquetWriter(path, schema, compression="zstd")


def _plain(table: pa.Table, format: str) -> pa.Table:
    """Return the table with columns of types that CSV or JSON can hold."""
    for index, field in enumerate(table.schema):
        if pa.types.is_float16(field.type):
            table = table.set_column(index, field.name, table.column(index).cast(pa.float32()))
        elif pa.types.is_binary(field.type):
            digits = [None if value is None else value.hex() for value in table.column(index).to_pylist()]
            table = table.set_column(index, field.name, pa.array(digits, pa.string()))
        elif pa.types.is_list(field.type) and format == "csv":
            table = table.set_column(index, field.name, _lists(table.column(index)))
    return table


def _lists(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return lists of numbers as JSON, whole numbers as such; NaN and infinities as Python's reader takes them."""
    if pa.types.is_float16(column.type.value_type):  # which has no text of its own
        column = column.cast(pa.list_(pa.float32()))
    numbers = pc.binary_join(column.cast(pa.list_(pa.string())), ", ")
    for arrow, python in (("nan", "NaN"), ("inf", "Infinity")):
        numbers = pc.replace_substring(numbers, arrow, python)
    return pc.binary_join_element_wise("[", numbers, "]", "")
