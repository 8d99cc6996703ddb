"""One flipped bit in one file of a run: no question answers from it as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.rewritten import forget_checksums

import twell.analysis as analysis
from twell.analysis.summaries.read import open_summaries
from twell.workbench.errors import UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.run.checks import verified, whole
from twell.workbench.run.parquet_part import GrowingFile
from twell.workbench.run.part_files import open_part, read_part
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.writer import arrow_schema

READERS: dict[str, Callable[[Run], object]] = {
    "frame": lambda run: run.frame("activity"),
    "activity": lambda run: run.activity(tidy=True),
    "rows": lambda run: run.rows("activity", [("sequence", "=", 1)]),
    "sql": lambda run: run.sql("select sum(nnz_01) from activity"),
    "contexts": lambda run: analysis.contexts(run, 3),
    "loudest": analysis.loudest,
    "by_layer": analysis.by_layer,
}


def flip(path: Path, byte: int, bit: int = 3) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


@pytest.mark.parametrize("reader", list(READERS))
@pytest.mark.parametrize("share", [0.1, 0.5, 0.98])
def test_a_part(small: Run, reader: str, share: float) -> None:
    """Whether it was read before or not: a file that has changed is compared with its checksum again."""
    if share == 0.5:
        READERS[reader](small)
        shutil.rmtree(small.path / "summary", ignore_errors=True)
    path = small.path / "activity" / "part-00001.parquet"
    flip(path, int(share * path.stat().st_size))
    with pytest.raises(UserError, match=r"activity/part-00001\.parquet.*(differs from its checksum)"):
        READERS[reader](small)


def test_a_query_over_other_tables_is_answered(small: Run) -> None:
    flip(small.path / "activity" / "part-00001.parquet", 300)
    assert len(small.sql("select * from neurons"))
    assert small.sql("select count(*) as n from sequences")["n"][0] == 24


def test_pages_carry_checksums(small: Run, tmp_path: Path) -> None:
    """Also without the manifest: pyarrow refuses a page whose bits have changed."""
    table = read_part(small.parts("tiles")[0])
    file = GrowingFile(tmp_path / "tiles.parquet", arrow_schema("tiles", small.layers, small.d_ff))
    file.write(table)
    file.close()
    assert open_part(tmp_path / "tiles.parquet").read().equals(table)
    group = pq.read_metadata(tmp_path / "tiles.parquet").row_group(0).column(3)
    flip(tmp_path / "tiles.parquet", group.data_page_offset + group.total_compressed_size - 5)
    # after the path, in which this test's own name says checksums
    with pytest.raises(UserError, match=r"(?i)\.parquet, got [^:]*(crc|checksum)"):
        read_part(tmp_path / "tiles.parquet")


def test_pages_are_compared_from_a_day_after_their_file_on(small: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later process goes by what an earlier one wrote down, and by when."""
    long_ago = time.time() - 10
    for path in small.files("tiles"):
        os.utime(path, (long_ago, long_ago))
    monkeypatch.setattr(verified, "COARSE_TICK", 0)
    monkeypatch.setattr(verified, "TICK", 0)
    (small.path / "summary").mkdir(exist_ok=True)
    (path, *_) = small.parts("tiles")
    verified._memory.clear()
    whole._whole.clear()
    assert not whole.is_whole(str(path), path.stat()), "nothing is known of it"
    monkeypatch.setattr(verified, "checksum", lambda path: pytest.fail(f"{path} is read again"))
    small.parts("tiles")
    assert whole.is_whole(str(path), path.stat())
    monkeypatch.setattr(whole.time, "time", lambda: long_ago + 100 + whole.DAY)  # the test may take 90 s
    assert not whole.is_whole(str(path), path.stat())


@pytest.mark.parametrize("name", ["layers", "positions", "tokens", "neurons"])
def test_a_summary_is_built_anew(small: Run, name: str) -> None:
    open_summaries(small, scored=True)
    path = small.summary_path(name)
    before = path.read_bytes()
    for byte in (20, len(before) // 2, len(before) - 30):
        flip(path, byte)
        analysis.by_layer(open_run(small.path)), analysis.by_position(small), analysis.by_token(small)
        assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["layers", "token_layers"])
def test_a_summary_only_run_refuses(small_copy: Run, name: str) -> None:
    copy = small_copy
    expected = analysis.by_layer(copy)
    path = copy.summary_path(name)
    flip(path, path.stat().st_size // 2)
    with pytest.raises(UserError, match=rf"{name}\.parquet.*differs from its checksum.*copy it again.*\.$"):
        analysis.by_layer(copy), analysis.token_profile(copy, 40)
    flip(path, path.stat().st_size // 2)
    assert analysis.by_layer(copy).equals(expected)


def test_summaries_of_before_have_no_checksums_and_open(small: Run, tmp_path: Path) -> None:
    import json

    (copy,) = analysis.summarize(SummarizeOptions(runs=(small.path,), summary_only=tmp_path / "copy"))
    built = copy.summary_path("any").parent / "built.json"
    assert set(json.loads(built.read_text())["files"]) <= set(SUMMARIES.tables)
    copy = forget_checksums(copy)
    assert "files" not in json.loads(built.read_text())
    assert len(analysis.by_layer(copy)) == copy.layers
    assert analysis.by_layer(copy).equals(analysis.by_layer(small))
