"""Summaries: what every table of the API is read from, kept beside the run's parts.

    read(run, "tokens")                             a summary as a DataFrame
    columns(run, "tokens", "token_id", "nnz_sum")   some of its columns as arrays, which costs what they take to decode

`summary/vN/` holds one Parquet file a table, declared in `workbench.schema.SUMMARIES` and sorted by `totals.KEYS`. They
are brought up to date first (`refresh`). Cost: 5 ms a million numbers; columns asked for again are those decoded
before, as long as their file is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from twell.analysis.memo import shared
from twell.analysis.summaries.refresh import LACKING, SCORED, SOURCES, damage, ensure, growing, listed
from twell.workbench.errors import Missing
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run

KEPT = 12  # choices of columns kept decoded, of one run or several: 50 MB of a long run with many layers
SINCE = {"surprisal_classes": 1, "used": 1}  # the revision that a table of copies came with, past the first
EARLIER = "its summaries are of an earlier revision: summarise the run it was copied from and copy it again"


def read(run: Run, name: str, columns: tuple[str, ...] = (), **equal: Any) -> pd.DataFrame:
    """A summary, brought up to date first: all columns, or those named, empty where a copy of an earlier revision lacks
    them; `equal` keeps the rows where a column has that value. Missing where the run has no such summary."""
    names = list(columns) or [column.name for column in SUMMARIES.tables[name].columns]
    return arrow(run, name, [*dict.fromkeys([*names, *equal])], **equal).to_pandas().reindex(columns=names)


@shared
def columns(run: Run, name: str, *names: str) -> dict[str, NDArray]:
    """Columns of a summary as arrays that cannot be written to, all NaN where a copy of an earlier revision lacks one.
    Missing where the run has no such summary."""
    path = _file(run, name)
    now = path.stat()
    return dict(_decoded(path, (now.st_ino, now.st_size, now.st_mtime_ns), names))


@lru_cache(maxsize=KEPT)
def _decoded(path: Path, version: tuple[int, ...], names: tuple[str, ...]) -> dict[str, NDArray]:
    """The columns of that version of a file."""
    table = _read(path, names)
    lacking = np.broadcast_to(np.nan, len(table))
    found = {column: table[column].to_numpy() if column in table.schema.names else lacking for column in names}
    for values in found.values():
        values.flags.writeable = False
    return found


def arrow(run: Run, name: str, names: Sequence[str], **equal: Any) -> pa.Table:
    """Columns of a summary as Arrow, without those that a copy of an earlier revision lacks; `equal` as in `read`."""
    found = _read(_file(run, name), names)
    for column, value in equal.items():
        found = found.filter(pa.array(found[column].to_numpy() == value))
    return found


def _file(run: Run, name: str) -> Path:
    """Where a summary lies, brought up to date."""
    ensure(run, scored=name in SCORED or not growing(run))
    path = run.summary_path(name)
    if not path.exists():
        raise Missing(f"{run.name} holds no {name}: {_lacking(run, name)}.")
    return path


def _read(path: Path, names: Sequence[str]) -> pa.Table:
    with pq.ParquetFile(path) as file:  # pq.read_table can filter, but takes longer to set up than a summary to read
        return file.read([column for column in names if column in file.schema_arrow.names], use_threads=False)


def words_kept(run: Run) -> tuple[int, int]:
    """How many words the run has, and how often those occur at least that its summary keeps."""
    told = pq.read_schema(run.summary_path("words")).metadata
    return int(told[b"words"]), int(told[b"least"])


def _lacking(run: Run, name: str) -> str:
    source = name if name in SOURCES else "activity"
    if source in damage(run):
        return damage(run)[source].rstrip(".")
    if listed(run).get("revision", 0) < SINCE.get(name, 0):
        return EARLIER
    if run.manifest.summary_only and not SUMMARIES.tables[name].in_summary_only:
        return "it is a summary-only run, which spells out none of its text"
    return LACKING.get(name, "it was not recorded")
