"""What is asked of a damaged run, and whether the answer is that of the whole one."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from support.questions import QUESTIONS

import twell.analysis as analysis
from twell.analysis import passage
from twell.analysis.exports.command import export
from twell.workbench.options import ExportOptions
from twell.workbench.run.store import Run, list_runs

Ask = Callable[[Run], Any]
SHOWN = 400  # characters of a difference

ROWS: dict[str, Ask] = {  # these read rows of tokens, which a copy without them lacks
    "frame activity": lambda run: run.frame("activity"),
    "frame sequences": lambda run: run.frame("sequences"),
    "frame fired": lambda run: run.frame("fired"),
    "activity tidy": lambda run: run.activity(tidy=True, layers=[1]),
    "rows": lambda run: run.rows("activity", [("sequence", "=", 5)]).to_pandas(),
    "sql counts": lambda run: run.sql(
        "select flags, count(*) as n, sum(nnz_01) as s from activity group by 1 order by 1"
    ),
    "sql join": lambda run: run.sql(
        "select sum(a.nnz_00 * s.tokens) as s from activity a join sequences s using (sequence)"
    ),
    "passage": lambda run: passage.passage(run, 3),
    "passage loudest": lambda run: passage.loudest(run, "L1"),
    "phases": passage.phases,
    "sequences": passage.sequences,
    "contexts": lambda run: analysis.contexts(run, 40, limit=5, width=4),
    "loudest": lambda run: analysis.loudest(run, limit=5, width=4),
    "examples": lambda run: analysis.examples(run, 0, 4),
    "together": lambda run: analysis.together(run, 0),
}
TABLES: dict[str, Ask] = {
    "frame vocab": lambda run: run.frame("vocab"),
    "frame timings": lambda run: run.frame("timings"),
    "frame bench": lambda run: run.frame("bench"),
    "sql timings": lambda run: run.sql(
        "select op, count(*) as n, max(microseconds) as m from timings group by 1 order by 1"
    ),
    "decode": lambda run: run.decode([1, 40, 41, 42, 7]),
    "overview": analysis.overview,
    "findings": analysis.findings,
    "by_word": analysis.by_word,
    "concentration": analysis.concentration,
    "dead_neurons": analysis.dead_neurons,
    "union_sizes": analysis.union_sizes,
    "tile_settings": analysis.tile_settings,
    "scale": lambda run: vars(passage.scale(run, "all")),
}
ALL: dict[str, Ask] = {**ROWS, **TABLES, **QUESTIONS}
SLOW = {
    "contexts",
    "loudest",
    "passage loudest",
    "examples",
    "findings",
    "overview",
    "layer_gains",
    "gain_correlations",
}
# These answers have no place for the names of what is left out: rows, tokens of one sequence, lists, text.
WITHOUT_WORDS = {"rows", "passage", "passage loudest", "phases", "decode", "scale"}


def exported(run: Run, name: str, folder: Path) -> pd.DataFrame:
    """Return a table as `twell export` writes it."""
    out = folder / f"{name}.parquet"
    with redirect_stdout(io.StringIO()):
        (path,) = export(ExportOptions(run=run.path, table=(name,), out=out))
    return pq.ParquetFile(path).read().to_pandas()


def listed(folder: Path, healthy: str, damaged: str) -> str:
    """Return what is wrong with the listing of a folder in which one run is damaged, "" if nothing is."""
    runs, broken = list_runs(folder)
    names = [run.name for run in runs]
    if healthy not in names:
        return f"{healthy} is not listed"
    if (damaged in names) + (damaged in broken) != 1:
        return f"{damaged} is listed {names.count(damaged)} times, and as broken: {broken}"
    return ""


def difference(expected: object, answer: object) -> str:
    """Return how an answer differs from the expected one, "" if it does not."""
    try:
        _compare(expected, answer)
    except AssertionError as error:
        return str(error)[:SHOWN] or "different"
    return ""


def _compare(expected: object, answer: object) -> None:
    if isinstance(expected, pd.DataFrame):
        assert isinstance(answer, pd.DataFrame)
        pd.testing.assert_frame_equal(answer, expected, rtol=1e-12, atol=1e-12)
    elif isinstance(expected, Mapping):
        assert isinstance(answer, Mapping) and answer.keys() == expected.keys(), f"{expected!r}, got {answer!r}"
        for name, value in expected.items():
            _compare(value, answer[name])
    elif isinstance(expected, float) and isinstance(answer, float):
        assert np.isclose(expected, answer, rtol=1e-12, atol=1e-12, equal_nan=True), f"{expected}, got {answer}"
    else:
        assert expected == answer, f"expected {expected!r}, got {answer!r}"


def words(answer: object) -> str:
    """Return all that an answer says in words: its notes, its cells of text, its reasons."""
    if isinstance(answer, pd.DataFrame):
        cells = [str(value) for name in answer.select_dtypes(["object", "string"]) for value in answer[name]]
        return " ".join([*map(str, answer.attrs.values()), *cells])
    return str(answer)
