"""Texts from a column: Parquet files, and datasets of the Hugging Face hub through the `datasets` library.

Rows are streamed, some hundred at a time. A column is named after a colon, as in `web.parquet:body`; without one it is
`text`. Of a dataset, `hf:org/name,CONFIG@SPLIT:COLUMN`, the configuration may be left out, and the split, which is then
train; in the place of its name may stand a folder, of data files or as `save_to_disk` leaves it. A row without text
(null) is an empty document.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from twell.workbench.errors import UserError, first_line

COLUMN = "text"
ROWS = 256  # read at a time
_DATASET = re.compile(r"hf:(?P<name>[^,@:]+)(,(?P<config>[^@:]+))?(@(?P<split>[^:]+))?(:(?P<column>.+))?")


def split(name: str) -> tuple[str, str]:
    """The path of a file and the column that is named after it, "" for none."""
    path, colon, column = name.rpartition(".parquet:")
    return (f"{path}.parquet", column) if colon else (name, "")


def parquet_texts(name: str) -> Iterator[str]:
    """The texts of a Parquet file's column, row by row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, named = split(name)
    column = named or COLUMN
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if column not in schema.names or not _is_text(schema.field(column).type):
                got = f"one of {schema.field(column).type}" if column in schema.names else "none"
                raise UserError(
                    f"Expected a column {column} of text in {path}, got {got}: name one of its columns "
                    f"({', '.join(schema.names)}) as {path}:COLUMN."
                )
            for batch in file.iter_batches(ROWS, columns=[column]):
                yield from (text or "" for text in batch.column(0).to_pylist())
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"Expected UTF-8 in column {column} of {path}, got byte 0x{byte:02x} in one of its texts: write it anew."
        ) from None
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"Expected to read {path}, got an error ({first_line(error)}): check the file.") from None


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def check_datasets(name: str) -> None:
    """UserError for a name that is no dataset's, and where the library is not installed."""
    if _DATASET.fullmatch(name) is None:
        raise UserError(f"Expected hf:DATASET, as in hf:org/name,CONFIG@SPLIT:COLUMN, got {name}: correct the name.")
    if importlib.util.find_spec("datasets") is None:
        raise UserError(f"Expected the datasets library for {name}, it is not installed: pip install datasets.")


def _rows(datasets: Any, name: str, config: str | None, split: str | None) -> Iterable[dict[str, Any]]:
    saved = [Path(name, file).is_file() for file in ("dataset_dict.json", "state.json")]  # of several splits, of one
    if not any(saved):
        return datasets.load_dataset(name, config, split=split or "train", streaming=True)
    if config or (split and not saved[0]):
        raise ValueError(f"it was saved to disk without a {'configuration' if config else 'split'}")
    found = datasets.load_from_disk(name)  # mapped, not read
    return found[split or "train"] if saved[0] else found


def hf_texts(name: str) -> Iterator[str]:
    """The texts of a dataset's column, streamed."""
    import datasets

    asked = _DATASET.fullmatch(name)
    assert asked is not None  # checked when the source was made
    column = asked["column"] or COLUMN
    try:
        for row in _rows(datasets, asked["name"], asked["config"], asked["split"]):
            text = row.get(column, 0)
            if not (text is None or isinstance(text, str)):
                got = f"one of {type(text).__name__}" if column in row else f"the columns {', '.join(row)}"
                raise UserError(f"Expected a column {column} of text in {name}, got {got}: name another as :COLUMN.")
            yield text or ""
    except UserError:
        raise
    except Exception as error:  # whatever the library, the network or the dataset's own files raise
        fault = first_line(error)
        raise UserError(f"Expected to read {name}, got an error ({fault}): check the name and the network.") from None
