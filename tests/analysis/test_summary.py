"""Summaries: built once, added to, rebuilt when stale, never half there; copies without rows; damage named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

import twell.analysis as analysis
from twell.analysis import build, by_layer, by_neuron, ensure, summarize, summary
from twell.analysis.engine import Engine
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.schema import SUMMARIES
from twell.workbench.store import Run, copy_without_activity, list_runs, open_run

QUESTIONS: dict[str, Callable[[Run], Any]] = {
    "by_layer": analysis.by_layer,
    "flagged": lambda run: analysis.by_layer(run, flagged=True),
    "layer_histogram": analysis.layer_histogram,
    "by_position": analysis.by_position,
    "position_blocks": analysis.position_blocks,
    "position_fit": analysis.position_fit,
    "by_token": analysis.by_token,
    "tokens with flagged": lambda run: analysis.by_token(run, flagged=True),
    "token_classes": analysis.token_classes,
    "token_profile": lambda run: analysis.token_profile(run, 40),
    "by_neuron": analysis.by_neuron,
    "surprisal": analysis.surprisal,
    "surprisal_correlation": analysis.surprisal_correlation,
    "speedup": analysis.speedup,
    "layer_gains": analysis.layer_gains,
    "gain_correlations": analysis.gain_correlations,
    "tile_audit": analysis.tile_audit,
    "peer_audit": analysis.peer_audit,
    "timings_by_batch": analysis.timings_by_batch,
}


def same(one: Run, other: Run) -> None:
    """Every table of two runs is the same: counts exactly, the rest to the last digits."""
    for name, question in QUESTIONS.items():
        pd.testing.assert_frame_equal(question(one), question(other), rtol=1e-12, atol=1e-12, obj=name)


@pytest.fixture
def small(made: ModuleType, tmp_path: Path) -> Run:
    return made.make(tmp_path / "small", sequences=24)


def changed(run: Run) -> dict[str, int]:
    """When each summary was last written."""
    return {path.name: path.stat().st_mtime_ns for path in run.summary_path("any").parent.iterdir()}


def test_declared_and_sorted(small: Run) -> None:
    import pyarrow.parquet as pq

    ensure(small)
    assert set(build.KEYS) == set(SUMMARIES.tables)
    for name, table in SUMMARIES.tables.items():
        found = pq.read_table(small.summary_path(name))
        assert found.schema.names == [column.name for column in table.columns], name
        types = [str(kind).replace("float", "float32") for kind in found.schema.types]
        assert types == [column.type for column in table.columns], name
        frame = found.to_pandas()
        keys = list(build.KEYS[name])
        assert not frame.duplicated(keys).any(), name
        pd.testing.assert_frame_equal(frame, frame.sort_values(keys, ignore_index=True), obj=name)


def test_built_once(small: Run) -> None:
    ensure(small)
    before = changed(small)
    by_layer(small)
    ensure(open_run(small.path))
    assert changed(small) == before


def test_chunks_add_up(made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made.make(tmp_path / "whole", sequences=40, parts=5)
    ensure(whole)
    shutil.copytree(whole.path, tmp_path / "chunks", ignore=shutil.ignore_patterns("summary"))
    monkeypatch.setattr(build, "CHUNK_TOKENS", 700)
    pieces = open_run(tmp_path / "chunks")
    assert len(list(build.chunks(pieces, {part.file for part in pieces.manifest.parts}))) > 2
    same(pieces, whole)


def grow(made: ModuleType, path: Path) -> tuple[Any, Any, Callable[[int], None]]:
    """A run being recorded, and a function that writes its next part."""
    shape = made.Shape(sequences=30)
    rng = np.random.default_rng(1)
    columns = made.draw(shape)
    writer = made.RunWriter(path, made.manifest(shape))
    writer.add("vocab", made.vocabulary(shape.vocab))
    writer.add("timings", made.timings(shape, columns, rng))

    def part(number: int) -> None:
        rows = columns["sequence"] // 10 == number
        made.add_part(writer, shape, {name: values[rows] for name, values in columns.items()}, rng)
        writer._wait()

    return writer, columns, part


def test_a_live_run_is_summarised_again_as_parts_come(made: ModuleType, tmp_path: Path) -> None:
    writer, columns, part = grow(made, tmp_path / "live")
    with pytest.raises(Missing, match="still being recorded"):
        ensure(open_run(tmp_path / "live"))
    part(0)
    early = open_run(tmp_path / "live")
    read: list[int] = []
    ensure(early, read.append)
    assert sum(read) == (columns["sequence"] < 10).sum()
    part(1)
    part(2)
    late = open_run(tmp_path / "live")
    read.clear()
    ensure(late, read.append)
    assert sum(read) == (columns["sequence"] >= 10).sum(), "a new part costs itself alone"
    before = changed(late)
    assert by_layer(early)["tokens"].equals(by_layer(late)["tokens"]), "an older reader does not undo newer summaries"
    assert changed(late) == before
    writer.finish()
    fresh = tmp_path / "fresh"
    shutil.copytree(tmp_path / "live", fresh, ignore=shutil.ignore_patterns("summary"))
    same(open_run(tmp_path / "live"), open_run(fresh))


def test_stale_summaries_are_rebuilt(made: ModuleType, small: Run, tmp_path: Path) -> None:
    ensure(small)
    other = made.make(tmp_path / "other", sequences=24, seed=9)
    stale = tmp_path / "other" / "summary"
    shutil.copytree(small.path / "summary", stale)
    expected = other.activity(flagged=False)["nnz_00"].mean()
    assert by_layer(small)["mean"].iloc[0] != pytest.approx(expected, rel=1e-9)
    assert by_layer(other)["mean"].iloc[0] == pytest.approx(expected, rel=1e-9)


def test_what_a_crash_leaves_is_not_taken_for_a_summary(small: Run) -> None:
    ensure(small)
    expected = by_layer(small)
    (small.summary_path("any").parent / "built.json").unlink()
    small.summary_path("layers").write_bytes(b"cut short")
    pd.testing.assert_frame_equal(by_layer(small), expected)


def test_a_crash_while_publishing_leaves_no_list(small: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure(small)
    real, calls = os.replace, []

    def fail_third(source: Any, target: Any) -> None:
        calls.append(target)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(source, target)

    manifest = replace(small.manifest, parts=small.manifest.parts[:-2])
    monkeypatch.setattr(os, "replace", fail_third)
    with pytest.raises(UserError, match="No space left on device: free some space"):
        ensure(Run(small.path, manifest))
    monkeypatch.undo()
    assert not (small.summary_path("any").parent / "built.json").exists()
    assert by_layer(small)["tokens"].iloc[0] == (small.frame("activity")["flags"] == 0).sum()


def test_two_processes_at_once(small: Run) -> None:
    code = "import sys, twell.analysis, twell.workbench as w; twell.analysis.ensure(w.open_run(sys.argv[1]))"
    both = [subprocess.Popen([sys.executable, "-c", code, str(small.path)], stderr=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate()[1].decode() for process in both] == ["", ""]
    built = json.loads((small.summary_path("any").parent / "built.json").read_text())
    assert len(built["parts"]) == 3 * len(summary.SOURCES)
    assert len(by_layer(small)) == small.layers


def test_one_builder_waits_for_another(small: Run) -> None:
    fcntl = pytest.importorskip("fcntl")
    (small.path / "summary").mkdir()
    thread = threading.Thread(target=ensure, args=(small,))
    with open(small.path / "summary" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread.start()
        thread.join(0.7)
        assert thread.is_alive()
        assert not small.summary_path("layers").exists()
    thread.join(60)
    assert small.summary_path("layers").exists()


def test_summary_only_copy_gives_the_same_tables(small: Run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (copy,) = summarize(SummarizeOptions(runs=(small.path,), summary_only=tmp_path / "copy"))
    assert copy.manifest.summary_only
    assert not copy.has("activity")
    assert not (copy.path / "activity").exists()
    assert not copy.has("sequences")
    for table in ("neurons", "tiles", "unions"):
        assert not copy.has(table), "its parts would be most of the copy, and the summary repeats them"
        with pytest.raises(Missing, match="added up over the parts, in its summary alone"):
            copy.frame(table)
    same(copy, small)
    assert analysis.overview(copy) == analysis.overview(small)
    said = capsys.readouterr().out
    assert "summaries of" in said
    assert str(copy.path) in said
    assert copy.damaged() == []


def test_copy_is_refused_where_something_is(small: Run, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        summarize(SummarizeOptions(runs=(small.path,), summary_only=tmp_path / "taken"))
    with pytest.raises(UserError, match="already holds a run"):
        copy_without_activity(small.path, small.path)


def test_a_copy_cut_short_is_no_run(small: Run, tmp_path: Path) -> None:
    ensure(small)
    (small.path / "vocab.parquet").unlink()
    with pytest.raises(UserError, match="Expected to copy"):
        copy_without_activity(small.path, tmp_path / "short")
    assert list_runs(tmp_path / "short") == ([], {})


def test_copy_of_several_runs_is_refused(small: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Expected one run with --summary-only, got 2"):
        summarize(SummarizeOptions(runs=(small.path, small.path), summary_only=tmp_path / "x"))


def test_summary_only_run_of_another_version(small: Run, tmp_path: Path) -> None:
    summarize(SummarizeOptions(runs=(small.path,), summary_only=tmp_path / "copy"))
    shutil.rmtree(tmp_path / "copy" / "summary")
    with pytest.raises(Missing, match="summarise the run it was copied from"):
        by_layer(open_run(tmp_path / "copy"))


@pytest.mark.parametrize("table", ["activity", "neurons"])
@pytest.mark.parametrize("harm", ["truncated", "deleted", "flipped"])
def test_a_damaged_part_is_named(small: Run, table: str, harm: str) -> None:
    path = small.path / table / "part-00001.parquet"
    data = path.read_bytes()
    if harm == "deleted":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(data[:100] + bytes(200) + data[300:])
    with pytest.raises(UserError, match=f"{table}/part-00001.parquet"):
        by_layer(small)
    assert not (small.summary_path("any").parent / "built.json").exists()


def test_a_newer_schema_is_refused(small: Run) -> None:
    path = small.path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))
    with pytest.raises(UserError, match=r"version 1 or older.*got version 99"):
        summarize(SummarizeOptions(runs=(small.path,)))


def test_an_interrupted_run_is_summarised(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "stopped", status="interrupted", sequences=10, parts=2)
    assert len(by_layer(run)) == run.layers


def test_a_folder_that_cannot_be_written_to(small: Run) -> None:
    (small.path / "summary").write_text("in the way")
    with pytest.raises(UserError, match="Expected to write summaries"):
        by_layer(small)


def test_names_that_look_like_patterns(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "l1=[2e-5] *?", sequences=10, parts=1)
    assert len(by_layer(run)) == run.layers
    assert len(analysis.contexts(run, 1, limit=3)) == 3


def test_wide_models(made: ModuleType, tmp_path: Path) -> None:
    """More than 99 layers, and counts that need 32 bits."""
    run = made.make(tmp_path / "wide", layers=101, d_ff=70_000, sequences=3, length=6, parts=1, neurons=False)
    table = by_layer(run)
    assert len(table) == 101
    assert table["mean"].iloc[100] == pytest.approx(run.activity(flagged=False)["nnz_100"].mean(), rel=1e-9)


def test_nothing_is_fetched() -> None:
    with Engine() as engine:
        for name in ("autoinstall_known_extensions", "autoload_known_extensions"):
            setting = engine._connection.raw_sql(f"select current_setting('{name}')").fetchone()
            assert setting == (False,), name


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
    pd.testing.assert_frame_equal(summary.read(small, table), expected)


def test_a_copy_of_a_wide_model_is_small(made: ModuleType, tmp_path: Path) -> None:
    """8 layers of 5632 and a vocabulary of 16 384: what ships as a recorded run."""
    shape = made.Shape(layers=8, d_ff=5632, vocab=16_384, sequences=60, length=1024, parts=3)
    run = made.make(tmp_path / "wide", shape)
    summarize(SummarizeOptions(runs=(run.path,), summary_only=tmp_path / "copy"))
    assert sum(path.stat().st_size for path in (tmp_path / "copy").rglob("*") if path.is_file()) < 2.5e6


def test_neurons_merge_extremes(small: Run) -> None:
    summary.ensure(small)
    parts = small.frame("neurons").groupby(["layer", "neuron"])
    assert by_neuron(small)["first_sequence"].max() == parts["first_sequence"].min().max()
