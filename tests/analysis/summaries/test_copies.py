"""Copies of a run without its rows of single tokens: the same tables, small, and never half a run."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.rewritten import forget_checksums

import twell.analysis as analysis
from twell.analysis import by_layer, ensure, summarize, surprisal_correlation, token_classes
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.run.store import Run, list_runs, open_run
from twell.workbench.run.summary_only import copy_without_activity


def test_summary_only_copy_gives_the_same_tables(
    questions: ModuleType, small: Run, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (copy,) = summarize(SummarizeOptions(runs=(small.path,), summary_only=tmp_path / "copy"))
    assert copy.manifest.summary_only
    assert not copy.has("activity")
    assert not (copy.path / "activity").exists()
    assert not copy.has("sequences")
    for table in ("neurons", "tiles", "unions"):
        assert not copy.has(table), "its parts would be most of the copy, and the summary repeats them"
        with pytest.raises(Missing, match="added up over the parts, in its summary alone"):
            copy.frame(table)
    questions.same(copy, small)
    whole, part = (analysis.overview(run) for run in (small, copy))
    named = {key: reason.replace(small.name, copy.name) for key, reason in whole["missing"].items()}
    assert part == whole | {"missing": named}
    printed = capsys.readouterr().out
    assert "summaries of" in printed
    assert str(copy.path) in printed
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
    with pytest.raises(UserError, match=r"Expected a whole run to copy, got: vocab\.parquet is missing"):
        copy_without_activity(small.path, tmp_path / "short")
    assert list_runs(tmp_path / "short") == ([], {})


def test_a_copy_that_cannot_be_written_is_said_to_be_one(small: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"Expected to copy .*, got Not a directory: free some space or choose"):
        summarize(SummarizeOptions(runs=(small.path,), summary_only=tmp_path / "file" / "copy"))


def test_copy_of_several_runs_is_refused(small: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Expected one run with --summary-only, got 2"):
        summarize(SummarizeOptions(runs=(small.path, small.path), summary_only=tmp_path / "x"))


def test_summary_only_run_of_another_version(small: Run, tmp_path: Path) -> None:
    summarize(SummarizeOptions(runs=(small.path,), summary_only=tmp_path / "copy"))
    shutil.rmtree(tmp_path / "copy" / "summary")
    with pytest.raises(UserError, match=r"built\.json is missing: summarise the run that they come from and"):
        by_layer(open_run(tmp_path / "copy"))


def test_a_copy_of_a_wide_model_is_small(made: ModuleType, tmp_path: Path) -> None:
    """8 layers of 5632 and a vocabulary of 16 384: what ships as a recorded run."""
    shape = made.Shape(layers=8, d_ff=5632, vocab=16_384, sequences=60, length=1024, parts=3)
    run = made.make(tmp_path / "wide", shape)
    summarize(SummarizeOptions(runs=(run.path,), summary_only=tmp_path / "copy"))
    assert sum(path.stat().st_size for path in (tmp_path / "copy").rglob("*") if path.is_file()) < 2.85e6


def test_a_copy_of_before_revision_7_says_what_it_is(small: Run, tmp_path: Path) -> None:
    """Correlations are corrected from the classes that they come from, where it has these, and said to be as they were
    where it has not; differences of classes take the layers as known, and say so."""
    (copy,) = summarize(SummarizeOptions(runs=(small.path,), summary_only=tmp_path / "copy"))
    expected, classes = surprisal_correlation(copy), token_classes(copy)
    assert "revision" not in expected.attrs["note"] and "as known" not in classes.attrs["note"]
    kept = copy.summary_path("surprisal_correlations")
    table = pq.read_table(kept, partitioning=None)
    halved = pa.array(table["spearman"].to_numpy() / 2)
    before = table.drop_columns(["kept"]).set_column(3, "spearman", halved)
    pq.write_table(before, kept)
    copy.summary_path("class_layers").unlink()
    copy = forget_checksums(copy)
    pd.testing.assert_frame_equal(surprisal_correlation(copy), expected)
    older = token_classes(copy)
    assert "as known" in older.attrs["note"]
    assert older["difference"].tolist() == classes["difference"].tolist()
    assert older["difference_high"].notna().tolist() == classes["difference_high"].notna().tolist()
    copy.summary_path("surprisal_ranks").unlink()
    as_it_was = surprisal_correlation(copy)
    assert "before revision 7" in as_it_was.attrs["note"]
    assert as_it_was["spearman"].tolist() == (expected["spearman"] / 2).tolist()
