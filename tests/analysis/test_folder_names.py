"""Runs in folders named as `layer=3` is, which readers of Parquet take for columns unless they are told not to."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import twell.analysis as analysis
from twell.analysis.engines.base import Engine
from twell.analysis.engines.open import open_engine
from twell.analysis.exports.command import export
from twell.workbench.options import ExportOptions
from twell.workbench.run.schema import SUMMARIES, TABLES, expand
from twell.workbench.run.store import Run, open_run

LAYERS, D_FF = 4, 64
COLUMNS = {name: {column.name for column in expand(table, LAYERS, D_FF, True)} for name, table in TABLES.items()}
DERIVED = {column.name for table in SUMMARIES.tables.values() for column in table.columns}
Answers = tuple[pd.DataFrame, pd.DataFrame, list[str], pa.Table | None]
NAMES = sorted(DERIVED.union(*COLUMNS.values()))


@pytest.fixture(scope="module")
def plain(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run under a name that nobody could take for a column."""
    folder = tmp_path_factory.mktemp("names") / "plain"
    return made.make(folder, layers=LAYERS, d_ff=D_FF, sequences=12, parts=2, fired=True, bench=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with open_engine() as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(plain: Run, engine: Engine) -> Callable[[str], Answers]:
    """Return a function that reads a table of the run by each reader, once."""
    return cache(lambda table: read(plain, table, engine))


@pytest.mark.parametrize("name", NAMES)
def test_frames_and_queries(
    plain: Run, expected: Callable[[str], Answers], engine: Engine, tmp_path: Path, name: str
) -> None:
    """What each reader takes from the parts of a table that has the column, or that might be given it."""
    run = copied(plain, tmp_path / f"{name}=3")
    for table in [table for table in TABLES if plain.has(table) and name in COLUMNS[table]] or ["sequences"]:
        answers = read(run, table, engine)
        for ours, theirs in zip(answers[:2], expected(table)[:2], strict=True):
            pd.testing.assert_frame_equal(ours, theirs)
        assert answers[2:] == expected(table)[2:]


def test_questions(plain: Run, questions: ModuleType, tmp_path: Path) -> None:
    """Every table of the analysis, examples, fired values, passages and exports, with all the names in one path."""
    run = copied(plain, tmp_path.joinpath(*[f"{name}=3" for name in NAMES], "plain"))
    questions.same(run, plain)
    pd.testing.assert_frame_equal(run.activity(tidy=True), plain.activity(tidy=True))
    for ask in (
        lambda run: analysis.contexts(run, 3, limit=5),
        lambda run: analysis.examples(run, 0, 4),
        lambda run: analysis.loudest(run),
        lambda run: analysis.passages(run, width=4),
        lambda run: analysis.together(run, 0),
    ):
        pd.testing.assert_frame_equal(ask(run), ask(plain))
    before, after = (exported(one, tmp_path / name) for one, name in ((plain, "before"), (run, "after")))
    assert before.keys() == after.keys()
    assert [name for name in before if not before[name].equals(after[name])] == []


def read(run: Run, table: str, engine: Engine) -> Answers:
    """Read a table as a frame, by SQL, by an engine, and, where it has sequences, some of its rows."""
    frame = run.frame(table)
    some = run.rows(table, [("sequence", "=", 5)]) if "sequence" in frame else None
    return frame, run.sql(f"select * from {table}"), sorted_rows(engine, run, table), some


def sorted_rows(engine: Engine, run: Run, table: str) -> list[str]:
    """Return a table's rows as an engine reads them, which is in no order of parts."""
    return sorted(str(row) for row in engine.arrow(engine.read(run.parts(table))).to_pylist())


def copied(run: Run, folder: Path) -> Run:
    """Return a copy of a run in a folder, without summaries."""
    shutil.copytree(run.path, folder, ignore=shutil.ignore_patterns("summary"))
    return open_run(folder)


def exported(run: Run, folder: Path) -> dict[str, pa.Table]:
    """Return the tables that `twell export` writes of a run."""
    return {path.name: pq.ParquetFile(path).read() for path in export(ExportOptions(run=run.path, out=folder))}
