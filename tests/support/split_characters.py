"""A made run whose tokens are all parts of characters, as many of a byte-level vocabulary are."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from support import synthetic_runs
from support.rewritten import relisted

from twell.workbench.run.store import Run


def bytes_of(token: int) -> bytes:
    """Return the first two bytes of a character of three, other ones for every token."""
    return bytes([0xE1 + token // 64, 0x80 + token % 64])


def split_run(path: Path) -> Run:
    """Make a run of 200 tokens whose displayed text is the same, but for the special one, whose piece has a � too."""
    run = synthetic_runs.make(path, sequences=60, fired=True)
    (file,) = run.parts("vocab")
    table = pq.read_table(file)
    data = [b"" if special else bytes_of(token) for token, special in enumerate(table["special"].to_pylist())]
    text = [one.decode("utf-8", errors="replace") if one else "<�>" for one in data]
    pq.write_table(pa.table(table.to_pydict() | {"bytes": data, "text": text}, schema=table.schema), file)
    return relisted(run, "vocab")
