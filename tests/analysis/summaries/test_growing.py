"""Summaries of runs that grow, change, or are read by several at once: added to, rebuilt, never half there."""

from __future__ import annotations

import json
import os
import re
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
from support.rewritten import forget_checksums

from twell.analysis import by_layer, by_token, by_word, ensure, summarize, surprisal_correlation
from twell.analysis.summaries import build, refresh
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.run import locks
from twell.workbench.run import manifest as manifests
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run, open_run


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
        writer.drain()

    return writer, columns, part


def test_a_live_run_is_summarised_again_as_parts_come(questions: ModuleType, made: ModuleType, tmp_path: Path) -> None:
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
    before = questions.changed(late)
    assert by_layer(early)["tokens"].equals(by_layer(late)["tokens"]), "an older reader does not undo newer summaries"
    assert questions.changed(late) == before
    writer.finish()
    fresh = tmp_path / "fresh"
    shutil.copytree(tmp_path / "live", fresh, ignore=shutil.ignore_patterns("summary"))
    questions.same(open_run(tmp_path / "live"), open_run(fresh))


def test_a_new_part_costs_only_itself(
    questions: ModuleType, made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What needs the means of the whole run is read again once it is asked for, and not before."""
    read: list[str] = []
    real = build.scores_of_part

    def noted(path: Path, **given: Any) -> Any:
        read.append(path.name)
        return real(path, **given)

    monkeypatch.setattr(build, "scores_of_part", noted)
    writer, _, part = grow(made, tmp_path / "live")
    part(0)
    part(1)
    early = open_run(tmp_path / "live")
    by_layer(early)
    surprisal_correlation(early)
    assert read == []
    assert not early.summary_path("token_scores").exists()
    assert by_token(early, min_count=1)["count"].sum() == by_layer(early)["tokens"].iloc[0]
    assert sorted(read) == ["part-00000.parquet", "part-00001.parquet"]
    read.clear()
    part(2)
    late = open_run(tmp_path / "live")
    by_layer(late)
    assert read == []
    before = by_layer(late)
    assert by_token(early, min_count=1)["count"].sum() == before["tokens"].iloc[0], "the run as it is by now"
    pd.testing.assert_frame_equal(by_layer(late), before)
    assert len(read) == 3
    by_word(late, min_count=1)
    ensure(late)
    assert len(read) == 3, "read once for both"
    writer.finish()
    shutil.copytree(tmp_path / "live", tmp_path / "fresh", ignore=shutil.ignore_patterns("summary"))
    questions.same(open_run(tmp_path / "live"), open_run(tmp_path / "fresh"))
    words = [by_word(open_run(tmp_path / name), min_count=1) for name in ("live", "fresh")]
    pd.testing.assert_frame_equal(*words, rtol=1e-12, atol=1e-12)


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


def test_a_builder_that_waited_for_another_writes_nothing(small: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began while the first was reading, saw that summaries lack, and finds them made once it has the lock."""
    asked, lists = threading.Event(), list[Run]()
    waiting = threading.Thread(target=ensure, args=(small,))
    is_current, write_built = refresh.is_current, refresh.write_built

    def tells(run: Run, scored: bool) -> bool:
        current = is_current(run, scored)
        if threading.current_thread() is waiting:
            asked.set()
        return current

    def counts(run: Run, *about: Any) -> None:
        write_built(run, *about)
        lists.append(run)

    def begin(tokens: int) -> None:
        if waiting.ident is None:
            waiting.start()
            assert asked.wait(60)

    monkeypatch.setattr(refresh, "is_current", tells)
    monkeypatch.setattr(refresh, "write_built", counts)
    ensure(small, begin)
    waiting.join(60)
    assert asked.is_set() and not waiting.is_alive()
    assert lists == [small]


def test_two_processes_at_once(small: Run) -> None:
    code = "import sys, twell.analysis, twell.workbench as w; twell.analysis.ensure(w.open_run(sys.argv[1]))"
    both = [subprocess.Popen([sys.executable, "-c", code, str(small.path)], stderr=subprocess.PIPE) for _ in range(2)]
    said = "".join(process.communicate()[1].decode() for process in both)
    folder = small.summary_path("any").parent
    assert said in ("", f"Waiting for another process that writes to {folder} …\n"), "the second on a busy machine"
    built = json.loads((folder / "built.json").read_text())
    tables = [name for name in (*SUMMARIES.sources, "sequences") if small.has(name)]
    assert len(built["parts"]) == 3 * len(tables) == 3 * 5
    assert len(by_layer(small)) == small.layers


def test_one_builder_waits_for_another(small: Run) -> None:
    thread = threading.Thread(target=ensure, args=(small,))
    with locks.locked(small.summary_path("layers").parent):
        thread.start()
        thread.join(0.7)
        assert thread.is_alive()
        assert not small.summary_path("layers").exists()
    thread.join(60)
    assert small.summary_path("layers").exists()


def test_summaries_of_an_earlier_revision(questions: ModuleType, small: Run, tmp_path: Path) -> None:
    """A run with its rows gets them anew; a copy without rows opens, and says what it lacks."""
    summarize(SummarizeOptions(runs=(small.path,), summary_only=tmp_path / "copy"))
    kept = [surprisal_correlation(small, by_class=by_class) for by_class in (False, True)]
    (tmp_path / "copy" / "summary" / "v2" / "surprisal_correlations.parquet").unlink()
    forget_checksums(open_run(tmp_path / "copy"))
    computed = [surprisal_correlation(open_run(tmp_path / "copy"), by_class=by_class) for by_class in (False, True)]
    for one, other in zip(kept, computed, strict=True):
        pd.testing.assert_frame_equal(one, other, check_exact=True)
        assert one.attrs == other.attrs
    for path in (small.path, tmp_path / "copy"):
        folder = open_run(path).summary_path("any").parent
        built = json.loads((folder / "built.json").read_text())
        built = {"version": built["version"], "parts": built["parts"]}
        manifests.update(path, summaries={})
        (folder / "built.json").write_text(json.dumps(built))
        (folder / "surprisal_classes.parquet").unlink()
        scores = pd.read_parquet(folder / "token_scores.parquet")
        scores.drop(columns=[name for name in scores if "position" in name]).to_parquet(folder / "token_scores.parquet")
    copy = open_run(tmp_path / "copy")
    with pytest.raises(Missing, match="of an earlier revision: summarise the run it was copied from"):
        surprisal_correlation(copy, by_class=True)
    table = by_token(copy, min_count=1)
    assert table["z"].notna().all()
    assert table[["z_position", "z_position_se"]].isna().all(axis=None)
    with pytest.raises(Missing, match="of an earlier revision"):
        by_token(copy, rank="z_position")
    assert by_token(small, min_count=1, rank="z_position")["z_position"].notna().all()
    assert len(surprisal_correlation(small, by_class=True))


def test_parts_of_several_ranks(questions: ModuleType, made: ModuleType, tmp_path: Path) -> None:
    """Each rank writes parts of its own, in the order in which they close; a new one costs itself alone."""
    whole = made.make(tmp_path / "whole", sequences=40, parts=4)
    folder = tmp_path / "ranks"
    shutil.copytree(whole.path, folder)
    manifest = json.loads((folder / "run.json").read_text())
    del manifest["sha256"]
    for part in manifest["parts"]:
        name = re.sub(r"part-0000([13])", r"rank-1-0000\1", part["file"])
        (folder / part["file"]).rename(folder / name)
        part["file"] = name
    manifest["parts"].sort(key=lambda part: "rank-1-" not in part["file"])
    (folder / "run.json").write_text(json.dumps(manifest))
    last = [part for part in manifest["parts"] if "part-00002" in part["file"]]
    running = {**manifest, "status": "recording", "parts": [part for part in manifest["parts"] if part not in last]}
    for table, name in (("activity", "tokens"), ("sequences", "sequences")):
        running[name] = sum(part["rows"] for part in running["parts"] if part["table"] == table)
    (folder / "run.json").write_text(json.dumps(running))
    ensure(open_run(folder))
    (folder / "run.json").write_text(json.dumps(manifest))
    read: list[int] = []
    ensure(open_run(folder), read.append)
    assert read == [part["rows"] for part in last if part["table"] == "activity"]
    questions.same(open_run(folder), whole)
