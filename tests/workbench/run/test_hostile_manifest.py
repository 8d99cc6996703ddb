"""Manifests that name files elsewhere, or numbers that no run has: one sentence, and nothing is touched."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twell.analysis import summarize
from twell.workbench.errors import UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.run.checks.manifest_fields import check_parts
from twell.workbench.run.manifest import Manifest
from twell.workbench.run.store import Run, list_runs, open_run
from twell.workbench.run.summary_only import copy_without_activity
from twell.workbench.run.writer import RunWriter

Maker = Callable[..., Any]
ELSEWHERE = [
    "../x.parquet",
    "../../x.parquet",
    "activity/../../x.parquet",
    "activity/..",
    "/etc/passwd",
    "/dev/zero",
    "s3://bucket/activity.parquet",
    "https://example.org/activity.parquet",
    "activity/*.parquet",
    "activity/part\n.parquet",
    "C:\\activity.parquet",
    "",
    ".",
    None,
    7,
]


@pytest.fixture
def run(tmp_path: Path, make_manifest: Maker, make_activity: Maker) -> Run:
    writer = RunWriter(tmp_path / "runs" / "one", make_manifest())
    writer.add("activity", make_activity(3, 5))
    writer.finish()
    (tmp_path / "x.parquet").write_text("mine")
    (tmp_path / "runs" / "x.parquet").write_text("mine")
    return open_run(tmp_path / "runs" / "one")


def edit(run: Run, change: Callable[[dict[str, Any]], Any]) -> None:
    path = run.path / "run.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def refusal(run: Run) -> str:
    """Return the sentence that the run is refused with, the same to all that open it."""
    with pytest.raises(UserError) as refused:
        open_run(run.path)
    sentence = str(refused.value)
    assert sentence.startswith("Expected") and sentence.endswith(".") and "\n" not in sentence
    assert list_runs(run.path.parent)[1] == {run.path.name: sentence}
    return sentence


@pytest.mark.parametrize("file", ELSEWHERE)
def test_files_elsewhere(run: Run, tmp_path: Path, file: object) -> None:
    edit(run, lambda data: data["parts"][0].update(file=file))
    assert "files of its own folder" in refusal(run) and repr(file) in refusal(run)
    with pytest.raises(UserError, match="files of its own folder"):
        summarize(SummarizeOptions(runs=(run.path,), summary_only=tmp_path / "copies" / "copy"))
    with pytest.raises(UserError, match="files of its own folder"):
        copy_without_activity(run.path, tmp_path / "copies" / "copy")
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "x.parquet"}
    assert (tmp_path / "x.parquet").read_text() == (tmp_path / "runs" / "x.parquet").read_text() == "mine"


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_links_out_of_the_folder(run: Run, tmp_path: Path, linked: str) -> None:
    moved = run.path / (run.manifest.parts[0].file if linked == "file" else "activity")
    moved.rename(tmp_path / "elsewhere")
    moved.symlink_to(tmp_path / "elsewhere")
    assert "files of its own folder" in refusal(run)


def test_links_within_the_folder_and_to_it(run: Run, tmp_path: Path) -> None:
    (run.path / "activity").rename(run.path / "rows")
    (run.path / "activity").symlink_to("rows")
    (tmp_path / "link").symlink_to(run.path)
    assert len(open_run(tmp_path / "link").frame("activity")) == 15


def test_strays_behind_a_link_are_left_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "part-00000.parquet").write_text("mine")
    (run.path / "neurons").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"^Expected .*neurons, got a link.*\.$"):
        RunWriter(run.path, open_run(run.path).manifest, resume=True)
    assert (tmp_path / "mine" / "part-00000.parquet").read_text() == "mine"


def test_a_folder_among_the_parts_is_left_alone(run: Run) -> None:
    (run.path / "activity" / "part-00009.parquet").mkdir()
    (run.path / "activity" / "part-00008.parquet").write_text("a stray")
    RunWriter(run.path, open_run(run.path).manifest, resume=True).finish()
    assert (run.path / "activity" / "part-00009.parquet").is_dir()
    assert not (run.path / "activity" / "part-00008.parquet").exists()


@pytest.mark.parametrize(
    ("name", "value"),
    [("layers", value) for value in (8 * 10**12, 0, -1, True, "3", 2.5, None, [3], 10**400)]
    + [("d_ff", value) for value in (2**40, 0, "64", None)],
)
def test_sizes_that_no_model_has(run: Run, name: str, value: object) -> None:
    edit(run, lambda data: data["model"].update({name: value}))
    assert f"{name} from 1 to" in refusal(run)


@pytest.mark.parametrize("change", [{"model": 5}, {"model": None}, {"parts": None}, {"parts": 5}, {"parts": [5]}])
def test_fields_of_another_kind(run: Run, change: dict[str, Any]) -> None:
    edit(run, lambda data: data.update(change))
    assert "manifest" in refusal(run)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": -1},
        {"tokens": 10**30},
        {"tokens": "7"},
        {"sequences": 1.5},
        {"rows": -3},
        {"bytes": None},
        {"rows": "1"},
    ],
)
def test_counts_that_no_run_has(run: Run, change: dict[str, Any]) -> None:
    edit(run, lambda data: (data if data.keys() >= change.keys() else data["parts"][0]).update(change))
    assert f"{next(iter(change))} from 0 to" in refusal(run)


def of_rows(folder: Path, summary_only: bool, rows: dict[str, int]) -> None:
    """Check a manifest of 7 tokens in 3 sequences whose parts hold so many rows."""
    parts = [{"table": table, "rows": number} for table, number in rows.items()]
    check_parts(folder, {"tokens": 7, "sequences": 3, "summary_only": summary_only, "parts": parts})


@pytest.mark.parametrize(
    ("summary_only", "rows"),
    [
        (False, {"activity": 7, "sequences": 3}),
        (False, {"activity": 7}),  # of before there was such a table
        (True, {"sequences": 3}),
        (True, {"neurons": 5}),
    ],
)
def test_rows_that_a_run_may_lack(tmp_path: Path, summary_only: bool, rows: dict[str, int]) -> None:
    of_rows(tmp_path, summary_only, rows)


@pytest.mark.parametrize(
    ("summary_only", "rows", "said"),
    [
        (False, {"sequences": 3}, "the 7 tokens of its manifest, got 0"),
        (False, {"activity": 6, "sequences": 3}, "the 7 tokens of its manifest, got 6"),
        (True, {"activity": 6}, "the 7 tokens of its manifest, got 6"),
        (False, {"activity": 7, "sequences": 4}, "the 3 sequences of its manifest, got 4"),
        (True, {"sequences": 0}, "the 3 sequences of its manifest, got 0"),
    ],
)
def test_rows_that_a_run_may_not_lack(tmp_path: Path, summary_only: bool, rows: dict[str, int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        of_rows(tmp_path, summary_only, rows)


def test_what_is_written_is_accepted(make_manifest: Maker, tmp_path: Path) -> None:
    """As large as any model will be for a while."""
    manifest: Manifest = make_manifest(layers=1000, d_ff=10**6)
    RunWriter(tmp_path / "large", manifest).finish()
    assert open_run(tmp_path / "large").layers == 1000
