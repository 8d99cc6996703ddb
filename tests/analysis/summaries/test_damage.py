"""Runs that are damaged, cut short, strangely named or unusually shaped: what is wrong is named, the rest computed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import twell.analysis as analysis
from twell.analysis import by_layer, by_neuron, ensure, summarize, tile_audit
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.run.store import Run


@pytest.mark.parametrize("table", ["activity", "neurons"])
@pytest.mark.parametrize("harm", ["truncated", "deleted", "flipped"])
def test_a_damaged_part_is_named_and_the_rest_computed(
    questions: ModuleType, small: Run, summarised: Run, table: str, harm: str
) -> None:
    ensure(small)
    shutil.rmtree(small.path / "summary")
    path = small.path / table / "part-00001.parquet"
    data = path.read_bytes()
    hurt(path, harm)
    kept, lost = (by_layer, by_neuron) if table == "neurons" else (tile_audit, by_layer)
    for _ in range(2):
        with pytest.raises(Missing, match=f"{table}/part-00001.parquet .*: |{table}/part-00001.parquet .* again from"):
            lost(small)
        assert len(kept(small))
    if table == "neurons":
        assert kept(small)["dead"].isna().all()
        assert f"{table}/part-00001.parquet" in kept(small).attrs["note"]
    assert len(tile_audit(small))
    before = questions.changed(small)
    assert len(kept(small))
    assert questions.changed(small) == before, "what is known to be damaged is not built again and again"
    path.write_bytes(data)
    assert len(lost(small))
    questions.same(small, summarised)


def hurt(path: Path, harm: str) -> None:
    """Damage a file in one of three ways."""
    data = path.read_bytes()
    if harm == "deleted":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(data[:100] + bytes(200) + data[300:])


def test_damage_is_told_by_the_command(small: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hurt(small.path / "tiles" / "part-00002.parquet", "flipped")
    summarize(SummarizeOptions(runs=(small.path,)))
    printed = capsys.readouterr().out
    assert "tiles left out: tiles/part-00002.parquet differs from its checksum" in printed
    with pytest.raises(UserError, match=r"Expected a whole run to copy, got: tiles/part-00002\.parquet differs"):
        summarize(SummarizeOptions(runs=(small.path,), summary_only=tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


def test_a_damaged_part_of_a_run_that_grows(made: ModuleType, questions: ModuleType, tmp_path: Path) -> None:
    """What was summarised before of the same table is no answer for the run as it is."""
    run = made.make(tmp_path / "run", sequences=30)
    early = Run(run.path, replace(run.manifest, parts=[part for part in run.manifest.parts if part.number < 2]))
    ensure(early)
    hurt(run.path / "neurons" / "part-00002.parquet", "truncated")
    assert by_layer(run)["tokens"].iloc[0] == (run.frame("activity")["flags"] == 0).sum()
    with pytest.raises(Missing, match=r"neurons/part-00002\.parquet differs"):
        by_neuron(run)


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
