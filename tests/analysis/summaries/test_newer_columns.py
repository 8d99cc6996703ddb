"""A column that is declared after a run was recorded: older files have nulls in its place, wherever they are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import synthetic_runs
from support.rewritten import relisted

from twell.analysis import ensure, export
from twell.analysis.summaries.built import DOCUMENTS
from twell.workbench.options import ExportOptions
from twell.workbench.run.columns import Column
from twell.workbench.run.schema import SUMMARIES, TABLES

# These are summed by functions that read columns by name from each file (`part_rows`, `part_sums`, `documents`).
READ_BY_NAME = ("activity", DOCUMENTS)
NEWER = Column("later", "int64", "", "declared later", True, is_newer=True)


def test_older_files_have_nulls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = synthetic_runs.make(tmp_path / "run", layers=2, d_ff=64, vocab=60, sequences=12, length=20, parts=2)
    ensure(run)
    before = pq.ParquetFile(run.summary_path("neurons")).read()
    for tables in (TABLES, SUMMARIES.tables):
        declared = tables["neurons"]
        monkeypatch.setitem(tables, "neurons", replace(declared, columns=(*declared.columns, NEWER)))
    path = run.parts("neurons")[1]  # the first part is from before
    rows = pq.ParquetFile(path).read()
    pq.write_table(rows.append_column("later", rows["fires"]), path)
    run = relisted(run, "neurons")
    ensure(run)
    after = pq.ParquetFile(run.summary_path("neurons")).read()
    assert after.select(before.schema.names).equals(before)
    second = rows.group_by(["layer", "neuron"]).aggregate([("fires", "sum")])
    assert pa.compute.sum(after["later"]).as_py() == pa.compute.sum(second["fires_sum"]).as_py()
    assert after["later"].null_count == len(after) - len(second)
    frame = run.frame("neurons")
    assert frame["later"].isna().sum() == len(frame) - len(rows)
    assert run.sql("select count(later) as n from neurons")["n"].item() == len(rows)
    (exported,) = export(ExportOptions(run=run.path, table=("neurons",), out=tmp_path / "neurons.csv"))
    assert len(exported.read_text().splitlines()) == 1 + len(frame)


def test_none_is_declared_where_older_files_cannot_be_read() -> None:
    """Let `part_rows` (activity; of entropy it does: test_entropy.py) or `documents` read null for it from older files
    before this test is changed."""
    newer = {name: [column.name for column in TABLES[name].columns if column.is_newer] for name in READ_BY_NAME}
    assert newer == {"activity": ["entropy"], DOCUMENTS: []}
    assert all(column.nullable for table in TABLES.values() for column in table.columns if column.is_newer)
