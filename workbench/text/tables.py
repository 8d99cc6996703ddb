"""Read texts from a column: of a Parquet file, or of a Hugging Face dataset through the `datasets` library.

Rows are streamed, ROWS at a time or fewer long ones, and repeated texts are kept once. A column is named after a colon,
as in `web.parquet:body`; without one it is `text`. A dataset is named `hf:org/name,CONFIG@SPLIT:COLUMN`, where the
configuration may be left out, and the split, which then is train. Its name may also be a folder of data files, or one
that `save_to_disk` wrote. A row without text (null) is an empty document.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from twell.workbench.errors import UserError, first_line, quoted
from twell.workbench.text.streams import BLOCK, LONGEST, too_long

COLUMN = "text"
ROWS = 256  # read at a time, at most
_DATASET = re.compile(r"hf:(?P<name>[^,@:]+)(,(?P<config>[^@:]+))?(@(?P<split>[^:]+))?(:(?P<column>.+))?")


def path_and_column(name: str) -> tuple[str, str]:
    """Return a source's path, and the column named after it, or "" if none is named."""
    path, colon, column = name.rpartition(".parquet:")
    return (f"{path}.parquet", column) if colon else (name, "")


def parquet_texts(name: str) -> Iterator[str]:
    """Yield the texts of a Parquet file's column, row by row. Raises UserError if it has no such column of text.

    name: the path, with a column after a colon or without one
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, named = path_and_column(name)
    column = named or COLUMN
    try:
        with pq.ParquetFile(path) as file:
            types = [field.type for field in file.schema_arrow if field.name == column]
            if len(types) != 1 or not _is_text(types[0]):
                got = f"{len(types) or 'none'}" if len(types) != 1 else f"one of {types[0]}"
                raise UserError(
                    f"Expected a column {quoted([column])} of text in {path}, got {got}: name one of its columns "
                    f"({quoted(file.schema_arrow.names)}) as {path}:COLUMN."
                )
            rows, metadata = _rows_at_a_time(file.metadata, column, path), file.metadata
        # Without reading ahead, and with each text of a dictionary once: what is in memory is a page, not a row group.
        options: dict[str, Any] = {"pre_buffer": False, "buffer_size": BLOCK, "read_dictionary": [column]}
        with pq.ParquetFile(path, metadata=metadata, **options) as file:
            for batch in file.iter_batches(rows, columns=[column]):
                yield from (value.as_py() or "" for value in batch.column(0))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(
            f"Expected UTF-8 in column {column} of {path}, got byte 0x{byte:02x} in one of its texts: write it anew."
        ) from None
    except (OSError, pa.ArrowException) as error:
        raise UserError(f"Expected to read {path}, got an error ({first_line(error)}): check the file.") from None


def _rows_at_a_time(metadata: Any, column: str, path: str) -> int:
    """Return how many rows to read at a time. Raises UserError for a row group whose texts are too long on the mean."""
    rows = ROWS
    for group in (metadata.row_group(index) for index in range(metadata.num_row_groups)):
        chunks = (group.column(index) for index in range(group.num_columns))
        chunk = next((chunk for chunk in chunks if chunk.path_in_schema == column), None)
        if chunk is None or not chunk.num_values:
            continue
        mean = chunk.total_uncompressed_size // chunk.num_values
        if mean > LONGEST:
            raise too_long(f"the rows of {path}")
        rows = min(rows, max(1, LONGEST // max(1, mean)))
    return rows


def _is_text(kind: Any) -> bool:
    """Return whether an Arrow type holds strings, also as a dictionary."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def check_datasets(name: str) -> None:
    """Raise UserError if a name is not that of a dataset, or if the library is not installed."""
    if _DATASET.fullmatch(name) is None:
        raise UserError(f"Expected hf:DATASET, as in hf:org/name,CONFIG@SPLIT:COLUMN, got {name}: correct the name.")
    if importlib.util.find_spec("datasets") is None:
        raise UserError(f"Expected the datasets library for {name}, it is not installed: pip install datasets.")


def _rows(datasets: Any, name: str, config: str | None, split: str | None) -> Iterable[dict[str, Any]]:
    """Return a dataset's rows. Raises ValueError for a configuration or split that a saved folder does not have.

    datasets: the library; name: of a dataset, or a folder
    """
    has_splits, is_one_split = (Path(name, file).is_file() for file in ("dataset_dict.json", "state.json"))
    if not (has_splits or is_one_split):
        return datasets.load_dataset(name, config, split=split or "train", streaming=True)
    if config or (split and not has_splits):
        raise ValueError(f"it was saved to disk without a {'configuration' if config else 'split'}")
    dataset = datasets.load_from_disk(name)  # mapped, not read
    return dataset[split or "train"] if has_splits else dataset


def hf_texts(name: str) -> Iterator[str]:
    """Yield the texts of a dataset's column, streamed. Raises UserError if it cannot be read or has no such text."""
    import datasets

    fields = _DATASET.fullmatch(name)
    assert fields is not None  # checked when the source was made
    column = fields["column"] or COLUMN
    try:
        for row in _rows(datasets, fields["name"], fields["config"], fields["split"]):
            text = row.get(column, 0)
            if not (text is None or isinstance(text, str)):
                got = f"one of {type(text).__name__}" if column in row else f"the columns {quoted(row)}"
                raise UserError(
                    f"Expected a column {quoted([column])} of text in {name}, got {got}: name another as :COLUMN."
                )
            yield text or ""
    except UserError:
        raise
    except Exception as error:  # whatever the library, the network or the dataset's own files raise
        fault = first_line(error)
        raise UserError(f"Expected to read {name}, got an error ({fault}): check the name and the network.") from None
