"""Where the figures of a bench go: a file, or a run's table, that others may write to as well."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from twell.workbench.bench.cases import _case
from twell.workbench.bench.options import BenchOptions
from twell.workbench.bench.table import Sheet, commit
from twell.workbench.errors import UserError
from twell.workbench.run.store import open_run
from twell.workbench.run.writer import RunWriter, arrow_schema


def row(case: str, value: float) -> dict[str, Any]:
    blank = {True: "", False: 0}
    return {field.name: blank[pa.types.is_string(field.type)] for field in arrow_schema("bench", 0, 0)} | {
        "case": case,
        "value": value,
        "graph": False,
    }


def figures(path: Path) -> dict[str, float]:
    table = pq.read_table(path)
    return dict(zip(table["case"].to_pylist(), table["value"].to_pylist(), strict=True))


def test_another_bench_meanwhile_loses_no_figure(tmp_path: Path) -> None:
    out = tmp_path / "new" / "figures.parquet"
    one, other = Sheet(out), Sheet(out)
    one.add([row("a", 1), row("b", 2)])
    other.add([row("c", 3)])
    one.add([row("b", 4)])  # in the place of its own
    assert figures(out) == {"a": 1, "b": 4, "c": 3}


def test_figures_go_into_a_run_as_it_stands(
    tmp_path: Path, make_manifest: Callable[..., Any], make_activity: Callable[..., Any]
) -> None:
    writer = RunWriter(tmp_path / "run", make_manifest())
    writer.add("activity", make_activity(2, 5))
    writer.finish()
    one, other = Sheet(tmp_path / "run"), Sheet(tmp_path / "run")
    one.add([row("a", 1)])
    other.add([row("b", 2)])
    run = open_run(tmp_path / "run")
    assert figures(run.parts("bench")[0]) == {"a": 1, "b": 2}
    assert run.has("activity") and run.damaged() == []


def test_weights_are_rotated_for_few_rows_on_a_gpu_or_as_asked() -> None:
    def cold(rows: int, device: str, weights: Any = "auto") -> bool:
        return _case(BenchOptions(weights=weights), torch.device(device), "made", "even", -1, rows, None).cold

    assert [cold(rows, "cuda") for rows in (1, 1024, 1025)] == [True, True, False]
    assert not cold(1, "cpu")
    assert cold(5000, "cpu", "cold") and not cold(1, "cuda", "warm")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sheet = Sheet(tmp_path / "file" / "figures.parquet")
    with pytest.raises(UserError, match=r"Expected to write .*figures\.parquet, got "):
        sheet.add([row("a", 1)])


def test_a_run_that_is_being_recorded_is_left_alone(tmp_path: Path, make_manifest: Callable[..., Any]) -> None:
    RunWriter(tmp_path / "run", make_manifest())
    with pytest.raises(UserError, match="is still being recorded: wait for it"):
        Sheet(tmp_path / "run")


def test_code_that_has_changed_since_its_commit_is_not_called_by_it(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(["git", "-C", tmp_path, *who, *arguments], capture_output=True, text=True).stdout.strip()

    (tmp_path / "kernels").mkdir()
    source = tmp_path / "kernels" / "run.py"
    source.write_text("1")
    bare = commit(tmp_path)
    assert bare.startswith("sources-")
    git("init"), git("add", "."), git("commit", "-m", "first"), git("tag", "-a", "v1", "-m", "a release")
    at = git("rev-parse", "HEAD")[:12]
    assert len(at) == 12 and commit(tmp_path) == at
    source.write_text("2")
    assert commit(tmp_path) == f"{at}+"


def test_without_a_checkout_code_is_called_by_the_sources_of_its_kernels(tmp_path: Path) -> None:
    """Whatever a compiler or Python reads of them, and nothing else."""
    (tmp_path / "kernels" / "csrc").mkdir(parents=True)
    (tmp_path / "workbench").mkdir()
    before = commit(tmp_path)
    for ending in ("py", "cpp", "h", "cu", "cuh"):
        path = tmp_path / "kernels" / "csrc" / f"gate.{ending}"
        path.write_text(f"a {ending}")
        assert commit(tmp_path) != before, ending
        before = commit(tmp_path)
    for other in ("kernels/README.md", "kernels/gate.so", "workbench/cli.py"):
        (tmp_path / other).write_text("another")
        assert commit(tmp_path) == before, other
    path.write_text("another")
    assert commit(tmp_path) != before
