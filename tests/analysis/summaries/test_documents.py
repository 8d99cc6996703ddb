"""Which document a sequence is of: clusters, replicates, and what becomes of them where little is known."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.rewritten import relisted

from twell.analysis import by_layer, by_position, by_token, ensure
from twell.analysis.summaries import part_sums
from twell.analysis.summaries.built import read_built
from twell.analysis.summaries.derived import drawn_interval
from twell.analysis.summaries.documents import (
    BLOCK,
    CUT,
    FEW,
    FURTHER,
    LATER,
    MOST_SOURCES,
    START,
    UNKNOWN,
    Documents,
    documents_of,
)
from twell.analysis.summaries.read import open_summaries
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run, open_run


def table(lengths: list[int], source: str = "a", first: int = 0) -> pa.Table:
    """Sequences of documents with so many sequences each."""
    document = np.repeat(np.arange(len(lengths)), lengths)
    start = np.concatenate([np.arange(n) * 64 for n in lengths])
    columns = {"sequence": first + np.arange(len(document)), "document": document, "start": start}
    return pa.table({**columns, "source": [source] * len(document)})


def rows(documents: Documents, sequence: Any) -> dict[str, list[int]]:
    sequence = np.asarray(sequence)
    return {name: values.tolist() for name, values in documents.of_rows(sequence, np.zeros_like(sequence)).items()}


def test_a_document_is_a_cluster() -> None:
    documents = documents_of(table([3] * FEW))
    columns = rows(documents, np.arange(3 * FEW))
    assert columns["cluster"] == columns["unit"] == np.repeat(np.arange(FEW), 3).tolist()
    assert columns["place"] == [START, CUT, CUT] * FEW
    assert documents.count(3 * FEW) == FEW
    assert documents.cut == ()


def test_long_documents_of_a_small_source_are_cut_into_blocks() -> None:
    """One book is blocks of 16 sequences; a document that is not longer stays whole, as it does among many."""
    documents = documents_of(table([2 * BLOCK + 1, 2, 1]))
    columns = rows(documents, np.arange(2 * BLOCK + 4))
    assert columns["cluster"] == [0] * BLOCK + [1] * BLOCK + [2, 3, 3, 4]
    assert columns["unit"] == [0] * BLOCK + [1] * BLOCK + [2, 1, 1, 2]
    assert documents.cut == ("a",)
    assert documents_of(table([BLOCK, 1])).cut == ()
    many = documents_of(table([2 * BLOCK + 1] + [1] * (FEW - 1)))
    assert rows(many, np.arange(2 * BLOCK + 2))["cluster"] == [0] * (2 * BLOCK + 1) + [1]
    assert many.cut == ()


def test_many_sources_share_the_last_name() -> None:
    """Of as many as are told apart each has its own; of two more the last three are further ones."""
    for more in (0, 2):
        names = [f"s{number:03}" for number in range(MOST_SOURCES + more)]
        documents = documents_of(pa.concat_tables([table([1], name, n) for n, name in enumerate(names)]))
        told = [documents.names[index] for index in rows(documents, np.arange(len(names)))["source"]]
        assert told == (names[: MOST_SOURCES - 1] + [FURTHER] * 3 if more else names)


def test_sequences_of_a_document_may_lie_apart() -> None:
    """As branches of a beam search do: a block is so many of the document's own, whatever their numbers are."""
    apart = table([2 * BLOCK, 2 * BLOCK + 1])
    numbers = np.concatenate([2 * np.arange(2 * BLOCK), 2 * np.arange(2 * BLOCK + 1) + 1])
    documents = documents_of(apart.set_column(0, "sequence", pa.array(numbers)))
    clusters = rows(documents, [*range(4 * BLOCK), 4 * BLOCK + 1])["cluster"]
    assert clusters == [0, 1] * BLOCK + [2, 3] * BLOCK + [4]
    assert documents.cut == ("a",)


def test_sources_are_told_apart() -> None:
    both = pa.concat_tables([table([2, 2]), table([1, 2], "b", first=4)])
    columns = rows(documents_of(both), np.arange(7))
    assert columns["cluster"] == [0, 0, 1, 1, 2, 3, 3]
    assert columns["source"] == [0, 0, 0, 0, 1, 1, 1]


def test_sequences_of_no_known_document_are_blocks() -> None:
    columns = rows(Documents.unknown(), np.arange(2 * BLOCK))
    assert columns["cluster"] == columns["unit"] == [0] * BLOCK + [1] * BLOCK
    assert set(columns["place"]) == {UNKNOWN}
    assert Documents.unknown().of_rows(np.array([3]), np.array([1]))["place"] == [LATER]


def test_sequences_of_no_known_document_are_blocks_beside_known_ones() -> None:
    """Their clusters are no document's, and neither are their sources."""
    columns = rows(documents_of(table([2, 1], first=1)), np.arange(BLOCK + 1))
    assert columns["cluster"] == [3, 0, 0, 1] + [3] * (BLOCK - 4) + [4]
    assert columns["unit"] == [0, 0, 0, 1] + [0] * (BLOCK - 4) + [1]
    assert columns["source"] == [1, 0, 0, 0] + [1] * (BLOCK - 3)
    assert columns["place"] == [UNKNOWN, START, CUT, START] + [UNKNOWN] * (BLOCK - 3)


def test_clusters_are_numbered_in_the_order_of_the_text() -> None:
    """Whatever the numbers of the documents are: pieces of a part end where clusters go up."""
    documents = documents_of(table([1, 1, 1]).set_column(0, "sequence", pa.array([2, 0, 1])))
    columns = rows(documents, np.arange(3))
    assert (columns["cluster"], columns["unit"]) == ([0, 1, 2], [1, 2, 0])


def test_sums_over_documents_that_stand_between_each_other(
    made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two sources, in both of which three take turns: squares are over documents, groups go by their own numbers."""
    monkeypatch.setattr(part_sums, "BLOCK", 20)  # rows that are added up at a time
    run = made.make(tmp_path / "run", sequences=24, length=9, parts=1, layers=1, sources=2)
    path = run.path / "sequences" / "part-00000.parquet"
    sequences = pq.read_table(path, partitioning=None)
    number = sequences["sequence"].to_numpy()
    of_document = {"document": number % 3, "start": number % 12 // 3 * 9}
    for name, values in of_document.items():
        at, kind = sequences.schema.names.index(name), sequences.schema.field(name)
        sequences = sequences.set_column(at, kind, pa.array(values, kind.type))
    pq.write_table(sequences, path)
    run = relisted(run, "sequences")
    rows = run.activity().merge(run.frame("sequences")[["sequence", "document", "source"]])
    placed = rows[(rows["flags"] == 0) | ((rows["position"] == 0) & (rows["flags"] < 4))]
    each = placed.groupby(["position", "source", "document"])["nnz_00"].agg(["size", "sum"])
    n, y = each["size"], each["sum"]
    squares = pd.DataFrame({"clusters": n > 0, "tokens_square": n**2, "nnz_square": y**2, "cross": y * n})
    expected = squares.groupby("position").sum()
    table = open_summaries(run).frame("positions").query("layer == 0 and not flagged").set_index("position")
    ours = table[["clusters", *(f"clusters_{name}" for name in squares.columns[1:])]]
    np.testing.assert_array_equal(ours, expected)
    assert ours["clusters"].max() == 6
    later = placed[placed["position"] > 0]
    bands = open_summaries(run).frame("position_bands").query("layer == 0").groupby("replicate")["nnz_sum"].sum()
    assert bands.to_dict() == later.groupby(later["document"] % 20)["nnz_00"].sum().to_dict()


def test_a_run_recorded_before_documents_were_known(small: Run) -> None:
    """24 sequences are two blocks of unequal length, which state no interval: nothing else changes."""
    before = by_layer(small)
    manifests.update(small.path, parts=[part for part in small.manifest.parts if part.table != "sequences"])
    run = open_run(small.path)
    after = by_layer(run)
    assert (read_built(run).known, read_built(run).clusters) == (False, 2)
    assert after["mean"].equals(before["mean"])
    assert before["low"].notna().all()
    assert after["low"].isna().all()


def test_one_document_states_no_interval(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "one", sequences=BLOCK, of_document=BLOCK, parts=1)
    assert by_layer(run)[["low", "high"]].isna().all(axis=None)
    assert by_position(run)[["se", "low", "high"]].isna().all(axis=None)
    assert by_token(run)["z_se"].isna().all()
    assert by_token(run)["z"].notna().all()


def test_documents_of_unequal_length_by_a_thousand(made: ModuleType, tmp_path: Path) -> None:
    """One that holds nearly all tokens leaves no interval, however many others there are."""

    def change(columns: dict[str, Any]) -> dict[str, Any]:
        kept = (columns["sequence"] == 0) | (columns["position"] < 2)
        return {name: values[kept] for name, values in columns.items()}

    run = made.make(tmp_path / "unequal", sequences=60, length=2000, of_document=1, parts=1, layers=1, change=change)
    assert by_layer(run)[["low", "high"]].isna().all(axis=None)
    assert read_built(run).clusters == 60
    assert by_position(run).query("position == 1")["se"].notna().all(), "each has one token there"


def test_a_source_that_grows_past_few_documents_is_summarised_anew(made: ModuleType, tmp_path: Path) -> None:
    """Its blocks are then whole documents, as if it had been read at once."""

    shape = made.Shape(sequences=BLOCK * 2 * (FEW + 2), length=3, of_document=2 * BLOCK, layers=1, tiles=False)
    columns = made.draw(shape)
    rng = np.random.default_rng(0)
    writer = made.RunWriter(tmp_path / "grown", made.manifest(shape))
    writer.add("vocab", made.vocabulary(shape.vocab))
    writer.add("timings", made.timings(shape, columns, rng))
    for low, high in ((0, 20), (20, FEW + 2)):
        here = (columns["sequence"] >= low * 2 * BLOCK) & (columns["sequence"] < high * 2 * BLOCK)
        made.add_part(writer, shape, {name: values[here] for name, values in columns.items()}, rng)
        writer.drain()
        run = open_run(tmp_path / "grown")
        ensure(run)
        assert read_built(run).cut == (["made:text"] if high < FEW else [])
        assert read_built(run).clusters == (2 * high if high < FEW else high)


def test_origins_add_up(made: ModuleType, tmp_path: Path) -> None:
    """By source, phase and place: the same tokens, nnz and losses as the rows."""
    run = made.make(tmp_path / "made", sequences=80, parts=2)
    rows = run.activity()
    counted = rows[(rows["flags"] == 0) | ((rows["position"] == 0) & (rows["flags"] < 4))]
    table = open_summaries(run).frame("origins")
    assert table.loc[table["layer"] == 0, "tokens"].sum() == len(counted)
    assert table.loc[table["layer"] == 1, "nnz_sum"].sum() == counted["nnz_01"].sum()
    opening = counted[(counted["position"] == 0) & (counted["sequence"] % 2 == 0)]
    assert table.query(f"layer == 0 and place == {START}")["tokens"].sum() == len(opening)
    losses = table[table["layer"] == -1][["loss_sum", "loss_tokens"]].sum()
    assert losses["loss_tokens"] == counted["loss"].notna().sum()
    assert losses["loss_sum"] / 2**24 == pytest.approx(counted["loss"].sum(), rel=1e-6)


def test_an_interval_of_groups_that_are_alike_ends_nowhere_and_warns_of_nothing() -> None:
    without = 1000.0 * np.array([*[1.0] * 19, 0.0])[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low, high = drawn_interval(without.mean(axis=0), without, 19.0)
    assert np.isinf([low, high]).any()
