"""Check a run's summaries: checksums, columns, order of the keys, and the same sums as a summary that is built anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
import pyarrow as pa

from twell.analysis.summaries.build import build
from twell.analysis.summaries.built import covered_parts, damaged_summaries, is_current, parts_of, read_built
from twell.analysis.summaries.documents import read_documents
from twell.workbench.errors import UserError
from twell.workbench.run.checks.columns_on_disk import column_fault
from twell.workbench.run.checks.ranges import Sizes
from twell.workbench.run.part_files import read_part
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run

NEAR = 1e-9  # of sums of z, which an engine adds in any order


def summary_faults(run: Run, tick: Callable[[int], None]) -> Iterator[str]:
    """Yield a sentence for each fault of the summaries. All parts are whole.

    tick: is called with the number of tokens read since the last call
    """
    built = read_built(run)
    if not built.parts:
        if run.manifest.summary_only:
            yield f"The copy {run.path} holds no summaries: summarise the run that it comes from and copy it again."
        return
    clauses = [f"{clause}." for clause in damaged_summaries(run, built)] or list(_column_faults(run))
    yield from clauses
    if clauses:
        return
    if run.manifest.summary_only:
        yield from _sum_faults(run)
    elif covered_parts(run, built) == parts_of(run) and is_current(run, built.scored):
        tables = build(run, parts_of(run).keys(), {}, tick, "duckdb", built.scored, read_documents(run))
        for name, table in tables.items():
            if table.num_rows and not _equal(name, table, run):
                yield f"The summary {name} of {run.path} is not what its parts add up to: remove the folder summary."


def _column_faults(run: Run) -> Iterator[str]:
    """Yield a sentence for each summary with a column that is not as declared, or whose keys are out of order."""
    for name, table in SUMMARIES.tables.items():
        path = run.summary_path(name)
        if not path.exists():
            continue
        fault = column_fault(path, name, table.columns, Sizes.of(run.manifest), complete=False)
        fault = fault or ("" if name == "words" else _order_fault(read_part(path), table.keys))
        if fault:
            yield f"{path.name} {fault}."


def _order_fault(rows: pa.Table, keys: tuple[str, ...]) -> str:
    """Return a clause if rows are not ascending by their keys, or if a key stands twice."""
    columns = [rows[key].to_pandas() for key in keys]
    codes = [column.rank(method="dense").to_numpy().astype(np.int64) for column in columns]
    combined = np.zeros(len(rows), np.int64)
    for code in codes:
        combined = combined * (int(code.max(initial=0)) + 1) + code
    return "" if (np.diff(combined) > 0).all() else "has keys out of order, or one twice"


def _sum_faults(run: Run) -> Iterator[str]:
    """Yield a sentence for each summary of a copy that counts other tokens than its manifest."""
    for name in ("layers", "tokens"):
        rows = read_part(run.summary_path(name)).to_pandas() if run.summary_path(name).exists() else pd.DataFrame()
        if len(rows):
            rows = rows[rows["layer"] == -1] if "layer" in rows else rows
            if rows["tokens"].sum() != run.manifest.tokens:
                yield f"The summary {name} of {run.path} counts other tokens than {run.manifest.tokens:,}."


def _equal(name: str, table: pa.Table, run: Run) -> bool:
    """Return whether the summary on disk is a table, but for the order in which floating-point numbers were added."""
    path = run.summary_path(name)
    if not path.exists():
        return False
    try:
        stored = read_part(path)
    except UserError:
        return False
    if SUMMARIES.tables[name].adds_up:
        return stored.select(table.schema.names).equals(table)
    try:
        pd.testing.assert_frame_equal(stored.to_pandas(), table.to_pandas(), rtol=NEAR, atol=NEAR)
    except AssertionError:
        return False
    return True
