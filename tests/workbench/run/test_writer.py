"""When the manifest changes: with each part, once, and with the last one it says how the run ended."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.same_runs import assert_nothing_else

from twell.workbench.run import manifest as manifests
from twell.workbench.run import writer
from twell.workbench.run.manifest import COMPLETE, INTERRUPTED, RECORDING, Manifest
from twell.workbench.run.parquet_part import GROUP, GrowingFile
from twell.workbench.run.part_files import LIVE
from twell.workbench.run.rank_share import RankShare
from twell.workbench.run.store import open_run
from twell.workbench.run.writer import RunWriter

Maker = Callable[..., Any]


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """List the status and the number of files in each manifest that is written."""
    published: list[tuple[str, int]] = []
    write = manifests.write

    def tells(folder: Path, manifest: Manifest) -> None:
        write(folder, manifest)
        published.append((manifest.status, len(manifest.parts)))

    monkeypatch.setattr(manifests, "write", tells)
    return published


def test_a_manifest_a_part(
    tmp_path: Path, make_manifest: Maker, make_activity: Maker, published: list[tuple[str, int]]
) -> None:
    run = RunWriter(tmp_path / "run", make_manifest())
    for _part in range(2):
        run.add("activity", make_activity(5, 10))
        run.close_part(seconds=1.0)
    run.add("activity", make_activity(5, 10))
    run.finish(seconds=2.0)
    assert published == [(RECORDING, 0), (RECORDING, 1), (RECORDING, 2), (COMPLETE, 3)]
    manifest = open_run(tmp_path / "run").manifest
    assert (manifest.status, manifest.seconds, manifest.tokens) == (COMPLETE, 2.0, 150)
    assert all(part.bytes == (tmp_path / "run" / part.file).stat().st_size for part in manifest.parts)


def test_a_run_that_ends_with_a_part_says_so_without_one(
    tmp_path: Path, make_manifest: Maker, make_activity: Maker, published: list[tuple[str, int]]
) -> None:
    run = RunWriter(tmp_path / "run", make_manifest())
    run.add("activity", make_activity(5, 10))
    run.close_part()
    run.finish(INTERRUPTED, loss_sum=7.0)
    assert published == [(RECORDING, 0), (RECORDING, 1), (INTERRUPTED, 1)]
    assert open_run(tmp_path / "run").manifest.loss_sum == 7.0


def test_a_part_is_due_by_its_size_or_its_age_and_never_empty(
    tmp_path: Path, make_manifest: Maker, make_activity: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_TOKENS", 60)
    run = RunWriter(tmp_path / "run", make_manifest())
    for age, rows, due in ((0.0, 0, False), (3600.0, 50, False), (0.0, 50, True), (3600.0, 60, True)):
        monkeypatch.setattr(writer, "PART_SECONDS", age)
        if rows > run._tokens:
            run.add("activity", make_activity((rows - run._tokens) // 10, 10, first=run._tokens // 10))
        assert run.due == due, (age, rows)
    run.close_part()
    assert not run.due
    run.finish()
    assert open_run(tmp_path / "run").manifest.tokens == 60


def test_values_of_windows_are_in_no_dictionary_and_all_else_is(tmp_path: Path) -> None:
    """A name that no column has would be passed over in silence."""
    kinds = {"kind": pa.string(), "window": pa.list_(pa.float32()), "neuron": pa.list_(pa.int16())}
    rows = pa.table({"kind": ["top"], "window": [[1.5, 0.0]], "neuron": [[3]]}, schema=pa.schema(kinds))
    file = GrowingFile(tmp_path / "examples.parquet", rows.schema)
    file.write(rows)
    file.close()
    group = pq.ParquetFile(file.path).metadata.row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    assert [column.path_in_schema.split(".")[0] for column in columns if column.has_dictionary_page] == [
        "kind",
        "neuron",
    ]
    assert pq.read_table(file.path).equals(rows)


def test_a_long_file_is_hashed_whole_and_read_in_groups(tmp_path: Path) -> None:
    """Random numbers, which no compression makes shorter than what is hashed at a time."""
    rows = pa.table({"value": np.random.default_rng(0).random(GROUP + 50_000)})
    file = GrowingFile(tmp_path / "part.parquet", rows.schema)
    file.write(rows)
    size, sha256 = file.close()
    stored = file.path.read_bytes()
    assert size == len(stored) > 2**20
    assert sha256 == hashlib.sha256(stored).hexdigest()
    metadata = pq.ParquetFile(file.path).metadata
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [GROUP, 50_000]


@pytest.mark.parametrize(("cores", "files"), [(1, 1), (3, 3), (64, 4)])
def test_rows_that_functions_make_keep_their_order_over_files_written_at_once(
    cores: int, files: int, tmp_path: Path, make_manifest: Maker, make_activity: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next part replaces them all, and rows of one file replace several."""
    monkeypatch.setattr(writer, "usable_cores", lambda: cores)
    monkeypatch.setattr(writer, "FILE_NEURONS", 64)
    run = RunWriter(tmp_path / "run", make_manifest(layers=4, d_ff=64))
    asked: list[int] = []

    def columns(layer: int, kept: float) -> dict[str, Any]:
        asked.append(layer)
        rows = {"neuron": [0, 1], "value": [kept, kept], "sequence": [0, 0], "position": [1, 2], "draw": [0.0, 0.0]}
        return rows | {"layer": [layer] * 2, "kind": ["top"] * 2, "window": [[kept], [0.0]]}

    for layers, kept in ((4, 1.0), (4, 2.0), (1, 3.0)):
        run.add("activity", make_activity(1, 8, layers=4))
        close = run.finish if layers == 1 else run.close_part
        close(tables=lambda layers=layers, kept=kept: (("examples", partial(columns, n, kept)) for n in range(layers)))
        run.drain()
        found = open_run(tmp_path / "run")
        rows = found.frame("examples")
        assert rows["layer"].tolist() == [layer for layer in range(layers) for _ in range(2)]
        assert set(rows["value"]) == {kept}
        numbers = {part.number for part in found.manifest.parts if part.table == "examples"}
        assert numbers == {max(part.number for part in found.manifest.parts if part.table == "activity")}
        listed = [path.name for path in found.parts("examples")]
        assert len(listed) == (files if layers > 1 else 1)
        assert sorted(path.name for path in (found.path / "examples").iterdir()) == sorted(listed)
    assert sorted(asked) == sorted([0, 1, 2, 3] * 2 + [0])
    assert len({part.number for part in found.manifest.parts if part.table == "activity"}) == 3


def example(value: float) -> list[tuple[str, dict[str, Any]]]:
    """Return one row of `examples`, a table of which a part replaces the one before."""
    row = {"layer": 0, "neuron": 1, "kind": "top", "value": value, "sequence": 0, "position": 1, "draw": 0.0}
    return [("examples", {name: [entry] for name, entry in (row | {"window": [value]}).items()})]


def test_a_file_that_is_replaced_stays_for_as_long_as_a_manifest_lists_it(
    tmp_path: Path, make_manifest: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash before the next manifest leaves a whole run."""
    run, write = RunWriter(tmp_path / "run", make_manifest()), manifests.write

    def checked(folder: Path, manifest: Manifest) -> None:
        assert open_run(folder).damaged() == []
        write(folder, manifest)

    monkeypatch.setattr(manifests, "write", checked)
    for value in (1.0, 2.0):
        run.close_part(partial(example, value))
    run.finish()
    assert open_run(run.folder).frame("examples")["value"].tolist() == [2.0]


def test_a_part_that_is_given_up_leaves_no_file(tmp_path: Path, make_manifest: Maker, make_activity: Maker) -> None:
    run = RunWriter(tmp_path / "run", make_manifest())
    run.add("activity", make_activity(2, 5))
    run.close_part()
    run.add_made("activity", partial(make_activity, 2, 5, first=2))
    run.drain()
    assert (run.folder / "activity" / "part-00001.parquet.tmp").exists()
    run.abandon()
    assert_nothing_else(open_run(run.folder))


def test_a_resumed_run_begins_after_its_last_part_and_without_strays(tmp_path: Path, make_manifest: Maker) -> None:
    """Which has a greater number than there are parts, where it replaced others."""
    run = RunWriter(tmp_path / "run", make_manifest())
    for value in (1.0, 2.0, 3.0):
        run.close_part(partial(example, value))
    run.finish(INTERRUPTED)
    names = ("vocab.parquet.tmp", "examples/part-00003.parquet.tmp", "examples/part-00001.parquet", LIVE, f"{LIVE}.tmp")
    strays = [run.folder / name for name in names]
    for stray in strays:
        stray.write_text("cut short")
    again = RunWriter(run.folder, open_run(run.folder).manifest, resume=True)
    assert not any(stray.exists() for stray in strays)
    again.finish(tables=partial(example, 4.0))
    assert [part.number for part in open_run(run.folder).manifest.parts] == [3]


def test_a_rank_that_resumes_removes_its_own_strays_alone(tmp_path: Path, make_manifest: Maker) -> None:
    """The others may be writing theirs already."""
    blank = RankShare(0, 11).blank_ranks()
    blank[1]["seconds"] = 5.0
    RunWriter(tmp_path / "run", replace(make_manifest(), ranks=blank)).finish(INTERRUPTED)
    names = ("part-00000.parquet.tmp", "rank-1-00000.parquet.tmp", "rank-10-00000.parquet.tmp")
    strays = [tmp_path / "run" / "activity" / name for name in names]
    strays[0].parent.mkdir(exist_ok=True)
    strays.append(tmp_path / "run" / "vocab.parquet.tmp")
    for stray in strays:
        stray.write_text("cut short")
    for rank, left in ((1, [True, False, True, True]), (0, [False, False, True, False])):
        share = RankShare(rank, 11)
        own = share.share(open_run(tmp_path / "run").manifest)
        RunWriter(tmp_path / "run", own, resume=True, share=share)
        assert own.seconds == (5.0 if rank else 0.0), "it goes on from its own"
        assert [stray.exists() for stray in strays] == left
