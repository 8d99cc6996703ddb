"""A document is one cluster wherever its rows lie: in one part, in two, dealt out among those of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from twell.analysis import ensure
from twell.analysis.summaries import documents as split
from twell.analysis.summaries.documents import read_documents
from twell.workbench.run import parquet_part
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run, open_run

SEQUENCES, PARTS = 48, 4
Deal = Callable[[Any], Any]  # the part of each sequence

DEALS: dict[str, Deal] = {
    "in turn": lambda sequence: sequence * PARTS // SEQUENCES,  # parts of 12 sequences, documents of five
    "dealt among ranks": lambda sequence: sequence % PARTS,
    "one in the middle of a part": lambda sequence: (sequence == 7).astype(int),  # the third of the second document
}


@pytest.fixture(autouse=True)
def row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts have several row groups, as those of a long run do."""
    monkeypatch.setattr(parquet_part, "GROUP", 100)


def write(made: ModuleType, path: Path, deal: Deal, after: Callable[[Path], object] = lambda path: None) -> Run:
    """Write one and the same run in parts; `after` is called with its folder after each of them."""
    shape = made.Shape(sequences=SEQUENCES, of_document=5, layers=2, neurons=False, tiles=False, timings=0)
    columns, rng = made.draw(shape), np.random.default_rng(1)
    part_of = deal(columns["sequence"])
    writer = made.RunWriter(path, made.manifest(shape))
    writer.add("vocab", made.vocabulary(shape.vocab))
    for number in np.unique(part_of):
        made.add_part(writer, shape, {name: each[part_of == number] for name, each in columns.items()}, rng)
        writer.drain()
        after(path)
    writer.finish()
    return open_run(path)


def summaries(run: Run) -> dict[str, pd.DataFrame]:
    ensure(run)
    frames = {name: pd.read_parquet(run.summary_path(name)) for name in SUMMARIES.tables if _is_there(run, name)}
    return {
        name: frame.sort_values([*SUMMARIES.tables[name].keys], ignore_index=True) for name, frame in frames.items()
    }


def _is_there(run: Run, name: str) -> bool:
    return run.summary_path(name).exists()


@pytest.fixture(scope="module")
def whole(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    """The summaries of the run in a single part."""
    return summaries(write(made, tmp_path_factory.mktemp("whole") / "run", np.zeros_like))


def assert_same(tables: dict[str, pd.DataFrame], expected: dict[str, pd.DataFrame]) -> None:
    assert tables.keys() == expected.keys()
    for name, frame in expected.items():
        pd.testing.assert_frame_equal(tables[name], frame, check_exact=not SUMMARIES.tables[name].needs_means, obj=name)


@pytest.mark.parametrize("deal", DEALS.values(), ids=DEALS)
def test_a_document_over_several_parts_is_one_cluster(
    made: ModuleType, whole: dict[str, pd.DataFrame], deal: Deal, tmp_path: Path
) -> None:
    assert_same(summaries(write(made, tmp_path / "run", deal)), whole)


@pytest.mark.parametrize("deal", DEALS.values(), ids=DEALS)
def test_a_part_that_goes_on_with_a_document_counts_it_once(
    made: ModuleType, whole: dict[str, pd.DataFrame], deal: Deal, tmp_path: Path
) -> None:
    """Each part is added to the sums of those before, which hold the beginning of the document already."""
    run = write(made, tmp_path / "run", deal, lambda path: ensure(open_run(path), scored=False))
    assert_same(summaries(run), whole)


def test_documents_are_shared_out_and_read_some_at_a_time(
    made: ModuleType, whole: dict[str, pd.DataFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "MOST_ROWS", 200)
    run = write(made, tmp_path / "run", DEALS["dealt among ranks"])
    homes = split.split_documents(run.parts("activity"), (), read_documents(run)).home
    assert [sum(map(len, home)) for home in homes.values()] == [3, 3, 2, 2]  # ten documents
    assert all(len(home) > 1 for home in homes.values())
    assert sorted(np.concatenate([*map(np.concatenate, homes.values())])) == list(range(10))
    assert_same(summaries(run), whole)


@pytest.mark.parametrize("options", [{"row_group_size": 1}, {"write_statistics": False}], ids=["groups", "no footer"])
def test_the_sequences_of_a_part_in_any_order_have_a_range(options: dict[str, Any], tmp_path: Path) -> None:
    """A part that hid a sequence from it would be taken to share no document with others."""
    pq.write_table(pa.table({"sequence": pa.array([4, 9, 2, 5], pa.int32())}), tmp_path / "part.parquet", **options)
    assert split._sequence_range(tmp_path / "part.parquet") == (2, 9)
