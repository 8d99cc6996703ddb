"""Write a table as Parquet in as few bytes as pyarrow can: for each column the encoding that turns out smallest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def write_small(table: pa.Table, path: Path, summary: bool = False) -> None:
    """Write a table as Parquet, each column in the encoding that is smallest.

    summary: whether pyarrow alone reads it; DuckDB, which reads parts too, does not know integers by streams of bytes
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    options: dict[str, Any] = {"use_dictionary": [], "column_encoding": {}}
    for field in table.schema:
        column, leaf = table.select([field.name]), leaf_path(field)
        candidates: list[dict[str, Any]] = [{"use_dictionary": True}]
        candidates += [
            {"use_dictionary": False, "column_encoding": {leaf: name}} for name in encodings(field.type, summary)
        ]
        least = min(candidates, key=lambda candidate: packed(column, candidate))
        if least["use_dictionary"]:
            options["use_dictionary"].append(leaf)
        else:
            options["column_encoding"] |= least["column_encoding"]
    temporary = path.with_name(path.name + ".tmp")
    _write(table, temporary, options)
    temporary.replace(path)


def leaf_path(field: pa.Field) -> str:
    """Return the path of a column's values in Parquet."""
    return f"{field.name}.list.element" if pa.types.is_list(field.type) else field.name


def encodings(kind: pa.DataType, summary: bool) -> list[str]:
    """Return the encodings to try for a type, beside a dictionary."""
    if pa.types.is_list(kind):
        return encodings(kind.value_type, summary)
    if pa.types.is_integer(kind):
        return ["PLAIN", "DELTA_BINARY_PACKED", *(["BYTE_STREAM_SPLIT"] if summary else [])]
    streams = pa.types.is_float32(kind) or pa.types.is_float64(kind) or (summary and pa.types.is_float16(kind))
    return ["PLAIN", "BYTE_STREAM_SPLIT"] if streams else ["PLAIN"]


def packed(table: pa.Table, options: dict[str, Any]) -> int:
    """Return the bytes of a table in an encoding."""
    sink = pa.BufferOutputStream()
    _write(table, sink, options)
    return int(sink.getvalue().size)


def _write(table: pa.Table, sink: Any, options: dict[str, Any]) -> None:
    how = {"compression": "zstd", "compression_level": 19, "write_page_checksum": True, "row_group_size": 2**20}
    pq.write_table(table, sink, **how, **options)
