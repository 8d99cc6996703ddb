"""Summaries: built once, over parts, as declared."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from twell.analysis import by_layer, by_neuron, ensure, summarize
from twell.analysis.engines import duckdb
from twell.analysis.engines.duckdb import DuckDBEngine
from twell.analysis.summaries.read import open_summaries
from twell.workbench.errors import Missing
from twell.workbench.options import SummarizeOptions
from twell.workbench.run import manifest as manifests
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run, open_run


def test_declared_and_sorted(made: ModuleType, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    def all_used(columns: dict[str, Any]) -> dict[str, Any]:
        return {**columns, **{name.replace("nnz", "used"): columns[name] for name in columns if name[:4] == "nnz_"}}

    small = made.make(tmp_path / "small", sequences=24, change=all_used, up_relu=True, fired=True)
    ensure(small)
    for name, table in SUMMARIES.tables.items():
        written = pq.read_table(small.summary_path(name))
        assert written.schema.names == [column.name for column in table.columns], name
        types = [str(kind).replace("float", "float32") for kind in written.schema.types]
        assert types == [column.type for column in table.columns], name
        frame = written.to_pandas()
        keys = list(table.keys)
        assert not frame.duplicated(keys).any(), name
        falls = name == "words"  # the most frequent first
        by = ["occurrences", *keys] if falls else keys
        ordered = frame.sort_values(by, ascending=[not falls, *[True] * (len(by) - 1)], ignore_index=True)
        pd.testing.assert_frame_equal(frame, ordered, obj=name)


def test_built_once(questions: ModuleType, small: Run) -> None:
    ensure(small)
    before = questions.changed(small)
    by_layer(small)
    ensure(open_run(small.path))
    assert questions.changed(small) == before


def test_nothing_is_fetched() -> None:
    with DuckDBEngine() as engine:
        for name in ("autoinstall_known_extensions", "autoload_known_extensions"):
            setting = engine.connection.raw_sql(f"select current_setting('{name}')").fetchone()
            assert setting == (False,), name


def asked(engine: DuckDBEngine) -> Any:
    return engine.connection.raw_sql("select 42").fetchone()


def test_engines_are_apart_and_outlive_each_other(small: Run) -> None:
    with DuckDBEngine() as one, DuckDBEngine() as other:
        name = one.read(small.parts("sequences")).get_name()
        assert name in one.connection.list_tables() and name not in other.connection.list_tables()
        one.close()
        assert asked(other) == (42,)
    opened, _ = duckdb._opened(os.getpid())
    opened.close()  # as by an error that DuckDB does not survive
    with DuckDBEngine() as engine:
        assert asked(engine) == (42,)


def test_threads_that_ask_first_at_once_open_one_duckdb() -> None:
    duckdb._opened.cache_clear()
    together = Barrier(8)

    def opened(_: int) -> int:
        together.wait()
        with DuckDBEngine() as engine:
            return asked(engine)[0]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(opened, range(8))) == [42] * 8
    assert duckdb._opened.cache_info().misses == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_asks_a_duckdb_of_its_own() -> None:
    """Its parent's has threads that a fork of it has not."""
    with DuckDBEngine() as engine:
        engine.connection.raw_sql("create table seen as select 1")
        if not (child := os.fork()):
            signal.alarm(60)
            try:
                with DuckDBEngine() as own:
                    os._exit(0 if asked(own) == (42,) and "seen" not in own.connection.list_tables() else 3)
            finally:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        engine.connection.raw_sql("drop table seen")


@pytest.mark.parametrize(
    ("table", "keys", "sums"),
    [
        ("tiles", ["layer", "tile", "occupancy"], ["pairs", "rows"]),
        ("unions", ["layer", "block", "neurons"], ["blocks"]),
    ],
)
def test_counts_of_parts_add_up(small: Run, table: str, keys: list[str], sums: list[str]) -> None:
    expected = small.frame(table).groupby(keys, as_index=False)[sums].sum()
    assert len(small.frame(table)) > len(expected), "parts share rows"
    pd.testing.assert_frame_equal(open_summaries(small).frame(table), expected)


def test_neurons_merge_extremes(small: Run) -> None:
    ensure(small)
    parts = small.frame("neurons").groupby(["layer", "neuron"])
    assert by_neuron(small)["first_sequence"].max() == parts["first_sequence"].min().max()


@pytest.mark.parametrize("probes", ["counts", "neurons"])
def test_a_run_whose_neurons_never_fired_has_dead_ones(probes: str, made: ModuleType, tmp_path: Path) -> None:
    def nothing(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {name: 0 * values for name, values in columns.items() if name.startswith("nnz_")}

    made.make(tmp_path / "none", sequences=24, change=nothing, neurons=False, tiles=False)  # no part of their sums
    manifests.update(tmp_path / "none", options={"probes": probes})
    run = open_run(tmp_path / "none")
    if probes == "counts":
        assert by_layer(run)["dead"].isna().all()
        with pytest.raises(Missing, match="captured with --probes counts"):
            by_neuron(run)
    else:
        assert by_layer(run)["dead"].tolist() == run.widths.tolist()
        assert len(by_neuron(run)) == run.neurons


def test_off_a_terminal_a_line_a_run_is_said(small: Run, capsys: pytest.CaptureFixture[str]) -> None:
    summarize(SummarizeOptions(runs=(small.path,)))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{small.path}: summaries of {small.manifest.tokens:,} tokens, ")
