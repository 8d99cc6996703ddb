"""The run on disk: what is written is read back, whole or not at all, and what is broken is named."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from twell.workbench.errors import Missing, UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run import parquet_part, schema, writer
from twell.workbench.run.manifest import Manifest
from twell.workbench.run.store import list_runs, open_run
from twell.workbench.run.writer import RunWriter, arrow_schema

Maker = Callable[..., Any]


def sequences_of(activity: dict[str, Any]) -> dict[str, Any]:
    numbers, counts = np.unique(activity["sequence"], return_counts=True)
    n = len(numbers)
    return {
        "sequence": numbers,
        "document": np.arange(n, dtype=np.int32),
        "start": np.zeros(n, np.int64),
        "source": ["made.txt"] * n,
        "tokens": counts.astype(np.int32),
    }


def record(folder: Path, manifest: Manifest, parts: list[dict[str, Any]]) -> None:
    run = RunWriter(folder, manifest)
    for activity in parts:
        run.add("activity", activity)
        run.add("sequences", sequences_of(activity))
        run.close_part()
    run.finish(loss_sum=12.5, loss_tokens=5)


def test_what_is_written_is_read_back(tmp_path: Path, make_manifest: Maker, make_activity: Maker) -> None:
    parts = [make_activity(2, 5), make_activity(3, 7, first=2)]
    record(tmp_path / "run", make_manifest(), parts)
    run = open_run(tmp_path / "run")
    frame = run.activity()
    for name in parts[0]:
        expected = np.ma.concatenate([part[name] for part in parts])
        got = frame[name].to_numpy()
        if name in ("loss", "entropy"):
            assert (np.isnan(got) == expected.mask).all()
            np.testing.assert_array_equal(got[~expected.mask], expected.compressed())
        else:
            np.testing.assert_array_equal(got, expected)
    assert (run.manifest.status, run.manifest.tokens, run.manifest.sequences) == ("complete", 31, 5)
    assert run.manifest.loss == 2.5
    assert run.damaged() == []


def test_activity_has_the_declared_types_and_compression(
    tmp_path: Path, make_manifest: Maker, make_activity: Maker
) -> None:
    record(tmp_path / "run", make_manifest(), [make_activity(2, 5)])
    file = pq.ParquetFile(open_run(tmp_path / "run").parts("activity")[0])
    assert file.schema_arrow.equals(arrow_schema("activity", 3, 64))
    column = file.metadata.row_group(0).column(file.schema_arrow.names.index("nnz_00"))
    assert (column.path_in_schema, column.compression) == ("nnz_00", "ZSTD")
    assert "RLE_DICTIONARY" in column.encodings


def test_counts_of_a_sparse_model_take_a_byte_on_disk(
    tmp_path: Path, make_manifest: Maker, make_activity: Maker
) -> None:
    """Heavy-tailed ones, of layers with a mean of 15 to 120 of 5632, as trained models have: less than 1.3 bytes."""
    drawn, activity = np.random.default_rng(0), make_activity(40, 500, layers=8)
    for layer in range(8):
        counts = drawn.lognormal(np.log(15 * 8 ** (layer / 7)) - 0.32, 0.8, 20_000)
        activity[f"nnz_{layer:02}"] = np.minimum(counts, 5632).astype(np.uint16)
    record(tmp_path / "run", make_manifest(layers=8, d_ff=5632), [activity])
    group = pq.ParquetFile(open_run(tmp_path / "run").parts("activity")[0]).metadata.row_group(0)
    columns = [group.column(place) for place in range(group.num_columns)]
    taken = sum(one.total_compressed_size for one in columns if one.path_in_schema.startswith("nnz_"))
    assert 0.7 < taken / (8 * 20_000) < 1.3


def test_counts_are_wide_enough_for_the_model() -> None:
    assert arrow_schema("activity", 2, 65535).field("nnz_01").type == pa.uint16()
    assert arrow_schema("activity", 2, 65536).field("nnz_01").type == pa.uint32()
    assert [schema.nnz_columns(layers)[-1] for layers in (100, 101)] == ["nnz_99", "nnz_100"]


def test_a_count_that_does_not_fit_is_refused(tmp_path: Path, make_manifest: Maker, make_activity: Maker) -> None:
    activity = make_activity(1, 4)
    activity["nnz_01"] = np.array([1, 2, 70_000, 3])
    run = RunWriter(tmp_path / "run", make_manifest())
    with pytest.raises(pa.ArrowInvalid):
        run.add("activity", activity)


def test_a_run_and_its_rows_can_be_shown(tmp_path: Path, make_manifest: Maker, make_activity: Maker) -> None:
    record(tmp_path / "run", make_manifest(), [make_activity(2, 5)])
    run = open_run(tmp_path / "run")
    assert repr(run).endswith("10 tokens, made, 3 layers of 64 neurons; tables activity, sequences)")
    with warnings.catch_warnings():  # of overflows, where pandas formats numbers of 16 bits
        warnings.simplefilter("error")
        assert len(str(run.activity(tidy=True)).splitlines()) > 10


def test_tidy_agrees_with_wide(tmp_path: Path, make_manifest: Maker, make_activity: Maker) -> None:
    record(tmp_path / "run", make_manifest(), [make_activity(4, 6)])
    run = open_run(tmp_path / "run")
    wide, tidy = run.activity(), run.activity(tidy=True, layers=[2, 0], flagged=False)
    assert set(tidy["layer"]) == {0, 2}
    assert (wide["nnz_00"] - wide["nnz_02"]).min() < 0, "a difference that wraps around is above 0"
    assert len(tidy) == 2 * (wide["flags"] == 0).sum()
    for layer in (0, 2):
        expected = wide.loc[wide["flags"] == 0, f"nnz_{layer:02d}"].to_numpy()
        np.testing.assert_array_equal(tidy.loc[tidy["layer"] == layer, "nnz"].to_numpy(), expected)
    with pytest.raises(UserError, match="from 0 to 2, got 3"):
        run.activity(layers=[3])


def test_sql_sees_every_table(tmp_path: Path, make_manifest: Maker, make_activity: Maker) -> None:
    record(tmp_path / "run", make_manifest(), [make_activity(2, 5), make_activity(1, 5, first=2)])
    run = open_run(tmp_path / "run")
    got = run.sql("select count(*) n, sum(nnz_00) s from activity join sequences using (sequence)")
    assert (got["n"][0], got["s"][0]) == (15, run.activity()["nnz_00"].sum())
    with pytest.raises(UserError, match="DuckDB query"):
        run.sql("select nothing from nowhere")


def test_files_the_manifest_does_not_list_are_not_the_run(
    tmp_path: Path, make_manifest: Maker, make_activity: Maker
) -> None:
    record(tmp_path / "run", make_manifest(), [make_activity(2, 5)])
    (tmp_path / "run/activity/part-00001.parquet").write_bytes(b"half a part")
    assert len(open_run(tmp_path / "run").activity()) == 10


def test_a_missing_table_is_said_with_the_reason(tmp_path: Path, make_manifest: Maker, make_activity: Maker) -> None:
    record(tmp_path / "run", make_manifest(summary_only=True), [])
    run = open_run(tmp_path / "run")
    with pytest.raises(Missing, match="holds no rows of single tokens: it is a summary-only run"):
        run.activity()
    with pytest.raises(UserError, match="Expected a table of activity"):
        run.parts("nonsense")


def test_broken_parts_are_named(tmp_path: Path, make_manifest: Maker, make_activity: Maker) -> None:
    record(tmp_path / "run", make_manifest(), [make_activity(2, 5), make_activity(2, 5, first=2)])
    run = open_run(tmp_path / "run")
    first, second = run.parts("activity")
    first.write_bytes(first.read_bytes()[:-20])
    second.unlink()
    sentences = run.damaged()
    assert [re.match(r"\S+", sentence).group() for sentence in sentences] == [  # type: ignore[union-attr]
        "activity/part-00000.parquet",
        "activity/part-00001.parquet",
    ]
    with pytest.raises(UserError, match=r"readable part at .*part-00000"):
        run.activity()


def test_a_newer_schema_is_refused_with_both_versions(tmp_path: Path, make_manifest: Maker) -> None:
    record(tmp_path / "run", make_manifest(), [])
    path = tmp_path / "run/run.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "schema_version": schema.SCHEMA_VERSION + 1}))
    message = f"schema version {schema.SCHEMA_VERSION} or older in .*, got version {schema.SCHEMA_VERSION + 1}"
    with pytest.raises(UserError, match=message):
        open_run(tmp_path / "run")


def test_migrations_lead_from_every_older_version_to_this_one() -> None:
    assert len(manifests.MIGRATIONS) == schema.SCHEMA_VERSION - 1


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema_version": 1}', '{"schema_version": "1"}'])
def test_a_manifest_cut_short_is_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/run.json").write_text(text)
    with pytest.raises(UserError, match=r"^Expected (a (readable|run) manifest at|.* in the manifest) \S+, got "):
        open_run(tmp_path / "run")


def test_a_folder_of_runs_lists_the_good_and_names_the_broken(
    tmp_path: Path, make_manifest: Maker, make_activity: Maker
) -> None:
    record(tmp_path / "old", make_manifest(created="2026-01-01T00:00:00+00:00"), [])
    record(tmp_path / "new", make_manifest(created="2026-02-01T00:00:00+00:00"), [])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/run.json").write_text("{")
    (tmp_path / "not a run").mkdir()
    runs, broken = list_runs(tmp_path)
    assert [run.name for run in runs] == ["new", "old"]
    assert list(broken) == ["broken"]
    assert [run.name for run in list_runs(tmp_path / "old")[0]] == ["old"]
    assert list_runs(tmp_path / "nowhere") == ([], {})


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, make_manifest: Maker) -> None:
    record(tmp_path / "run", make_manifest(), [])
    before = (tmp_path / "run/run.json").read_bytes()
    with pytest.raises(UserError, match="already holds a run"):
        RunWriter(tmp_path / "run", make_manifest())
    assert (tmp_path / "run/run.json").read_bytes() == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other/mine.txt").write_text("mine")
    with pytest.raises(UserError, match="holds other files"):
        RunWriter(tmp_path / "other", make_manifest())


def test_a_full_disk_is_one_sentence_and_keeps_what_was_written(
    tmp_path: Path, make_manifest: Maker, make_activity: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunWriter(tmp_path / "run", make_manifest())
    run.add("activity", make_activity(2, 5))
    run.close_part()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run.drain()
    monkeypatch.setattr(parquet_part.pq.ParquetWriter, "write_table", full)
    run.add("activity", make_activity(2, 5, first=2))
    run.close_part()
    with pytest.raises(UserError, match="the disk is full"):
        run.drain()
    monkeypatch.undo()
    run.abandon()
    kept = open_run(tmp_path / "run")
    assert (kept.manifest.status, len(kept.activity())) == ("interrupted", 10)


def test_a_part_is_due_by_tokens_and_by_age(
    tmp_path: Path, make_manifest: Maker, make_activity: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_TOKENS", 12)
    run = RunWriter(tmp_path / "run", make_manifest())
    assert not run.due
    run.add("activity", make_activity(2, 5))
    assert not run.due
    run.add("activity", make_activity(1, 2, first=2))
    assert run.due
    run.close_part()
    assert not run.due
    run.add("activity", make_activity(1, 2, first=3))
    monkeypatch.setattr(writer, "PART_SECONDS", 0.0)
    assert run.due
    run.finish()


KILLED = """
    import sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from conftest import made_activity, made_manifest
    from twell.workbench.run.writer import RunWriter
    run = RunWriter(Path({folder!r}), made_manifest())
    for number in range(10**6):
        run.add("activity", made_activity(20, 50, first=20 * number))
        run.close_part()
        if not number:
            run.drain()
        print(number, flush=True)
"""


def test_kill_9_at_any_moment_leaves_whole_parts(tmp_path: Path) -> None:
    """Kill a process that writes as fast as it can, at five moments; what is listed must be whole."""
    tests = str(Path(__file__).parents[2])
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        code = textwrap.dedent(KILLED.format(tests=tests, folder=str(folder)))
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "0"
        time.sleep(0.03 + 0.041 * attempt)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        run = open_run(folder)
        assert run.manifest.status == "recording"
        assert run.damaged() == []
        frame = run.activity()
        assert len(frame) == run.manifest.tokens > 0
        assert len(frame) % 1000 == 0
        assert (frame.groupby("sequence")["position"].max() == 49).all()
