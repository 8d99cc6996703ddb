"""Runs that are damaged, cut short, strangely named or unusually shaped: what is wrong is named, the rest computed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

import twell.analysis as analysis
from twell.analysis import by_layer, summarize
from twell.workbench.errors import UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.store import Run


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
