"""Rows of a part: read in pieces of whole sequences, in the order of the text, and added up exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from support.rewritten import relisted

from twell.analysis import ensure
from twell.analysis.summaries import part_rows, part_sums, token_sums
from twell.analysis.summaries.documents import read_documents
from twell.analysis.summaries.read import open_summaries
from twell.analysis.summaries.token_class import Classes
from twell.workbench.errors import UserError
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run, open_run


def whole(run: Run, part: int = 0) -> list[part_rows.PartRows]:
    return list(part_rows.pieces(run.parts("activity")[part], nnz_columns(run.layers), read_documents(run)))


def same(one: part_rows.PartRows, table: pa.Table, layers: int) -> None:
    names = {"sequence": "sequence", "position": "position", "token": "token_id", "flags": "flags"}
    for name, column in names.items():
        assert getattr(one, name).tolist() == table[column].to_pylist(), name
    assert one.counts.dtype == np.uint16
    for layer, name in enumerate(nnz_columns(layers)):
        assert one.counts[:, layer].tolist() == table[name].to_pylist()
    known = [loss is not None for loss in table["loss"].to_pylist()]
    assert np.isfinite(one.loss).tolist() == known
    assert one.loss[known].tolist() == table["loss"].drop_null().to_numpy().astype(float).tolist()
    assert one.entropy[known].tolist() == table["entropy"].drop_null().to_pylist()
    assert np.isfinite(one.entropy).tolist() == known


@pytest.mark.parametrize("most", [1, 70, 700, 10**6])
def test_pieces_are_whole_documents(run: Run, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(part_rows, "PIECE", most)
    monkeypatch.setattr(part_rows, "READ", 97)
    pieces, table = whole(run), pq.read_table(run.parts("activity")[0])
    documents = [set(piece.cluster.tolist()) for piece in pieces]
    assert sum(map(len, documents)) == len(set().union(*documents)), "none is cut"
    assert all(len(piece) <= most or len(set(piece.cluster)) == 1 for piece in pieces)
    assert len(pieces) == {1: (table["sequence"].to_pandas() // 2).nunique(), 10**6: 1}.get(most, len(pieces))
    assert len(pieces) == -(-len(table) // most) or most < 10**6
    columns = [field for field in part_rows.PartRows.__dataclass_fields__]
    joined = part_rows.PartRows(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in columns))
    same(joined, table, run.layers)


def test_rows_out_of_order(small: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer's part may hold its sequences mixed: they are put in the order of the text, and none is cut."""
    path = small.parts("activity")[0]
    table = pq.read_table(path)
    expected = whole(small)[0]
    pq.write_table(table.take(np.random.default_rng(0).permutation(len(table))), path)
    small = relisted(small, "activity")
    monkeypatch.setattr(part_rows, "PIECE", 50)
    (mixed,) = whole(small)
    for name in part_rows.PartRows.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(mixed, name), getattr(expected, name))


def test_summaries_of_pieces_and_of_parts_mixed(
    questions: ModuleType, made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made.make(tmp_path / "whole", sequences=40, parts=2)
    ensure(run)
    other = made.make(tmp_path / "pieces", sequences=40, parts=2)
    monkeypatch.setattr(part_rows, "PIECE", 300)
    for module in (part_rows, part_sums, token_sums):
        monkeypatch.setattr(module, "BLOCK", 57)
    assert len(whole(other)) > 2
    ensure(other)
    questions.same(other, run)


@pytest.mark.parametrize("far", [False, True], ids=["packed", "apart"])
def test_groups(far: bool) -> None:
    """Rows of a unit in a sequence stand together, whether their numbers fit into 64 bits with the row's or not."""
    rng = np.random.default_rng(1)
    unit, sequence = rng.integers(0, 30, 2000), rng.integers(5, 40, 2000).astype(np.int32)
    unit = unit * (2**44 if far else 1)
    order, starts = part_rows.groups(unit, sequence)
    assert sorted(order.tolist()) == list(range(2000))
    pairs = [set(zip(unit[few].tolist(), sequence[few].tolist(), strict=True)) for few in np.split(order, starts[1:])]
    assert all(len(pair) == 1 for pair in pairs)
    assert [pair for few in pairs for pair in few] == sorted(set(zip(unit.tolist(), sequence.tolist(), strict=True)))


def wide(change: Callable[[dict[str, Any]], Any]) -> part_rows.PartRows:
    """90 rows of 2 layers, 3 tokens in 4 sequences of 3 documents, some flagged."""
    rng = np.random.default_rng(2)
    columns = {
        "sequence": np.repeat([0, 1, 2, 3], [30, 20, 25, 15]),
        "position": np.concatenate([np.arange(n) for n in (30, 20, 25, 15)]),
        "token": rng.integers(0, 3, 90),
        "flags": (rng.random(90) < 0.2).astype(np.uint8),
        "loss": rng.gamma(1.5, 2.0, 90).astype(np.float16).astype(float),
        "phase": np.zeros(90, np.uint8),
        "entropy": np.full(90, np.nan, np.float32),
        "counts": rng.integers(0, 2**16, (90, 2)).astype(np.uint32),
        "cluster": np.repeat([0, 1, 2], [50, 25, 15]),
        "unit": np.repeat([0, 1, 2], [50, 25, 15]),
        "source": np.zeros(90, np.int32),
        "place": np.zeros(90, np.uint8),
    }
    change(columns)
    return part_rows.PartRows(**columns)


def test_sums_by_token_are_exact_past_2_to_53() -> None:
    """Against Python's integers, with counts whose squares float64 does not hold; a token that is flagged wherever it
    stands has no sum over unflagged ones."""

    def change(columns: dict[str, Any]) -> None:
        columns["counts"] = columns["counts"] * 2**9 + 1
        columns["token"][40], columns["flags"][40] = 3, 2

    few = wide(change)
    total = few.counts.sum(axis=1, dtype=np.int64)
    tables = token_sums.tokens(few, total)
    table = [a | b for a, b in zip(*(tables[name].to_pylist() for name in ("tokens", "token_layers")), strict=True)]
    assert [(row["token_id"], row["flagged"]) for row in table] == [(t, f) for f in (False, True) for t in range(3 + f)]
    for row in table:
        for layer, values in (("[0]", few.counts[:, 0]), ("[1]", few.counts[:, 1]), ("", total)):
            both = []
            for every in (True, False):
                rows_of = [
                    [i for i in range(90) if few.cluster[i] == d and few.token[i] == row["token_id"]] for d in range(3)
                ]
                kept = [[i for i in group if every or not few.flags[i]] for group in rows_of]
                pairs = [(sum(int(values[i]) for i in group), len(group)) for group in kept if group]
                squares = sum(y * y for y, _ in pairs), sum(y * n for y, n in pairs), sum(n * n for _, n in pairs)
                sequences = len({few.sequence[i] for group in kept for i in group})
                both.append([sum(y for y, _ in pairs), *squares, sum(n for _, n in pairs), sequences, len(pairs)])
            expected = np.subtract(*both).tolist() if row["flagged"] else both[1]
            names = [
                *(f"nnz_{kind}{layer}" for kind in ("sum", "square", "cross")),
                "tokens_square",
                "tokens",
                "sequences",
                "clusters",
            ]
            assert [row[column] for column in names] == expected
    assert max(row["nnz_square"] for row in table) > 2**53


def test_a_tokens_own_loss_is_that_of_the_position_before() -> None:
    """And of no other: not after a gap, nor of the sequence before, even where that one's end has a loss; and where
    the position before has none, there is none."""

    def gap(columns: dict[str, Any]) -> None:
        columns["position"][10:30] += 3
        columns["loss"][[4, 40, 60]] = np.nan
        columns["counts"] = columns["counts"].astype(np.uint16)

    few = wide(gap)
    known = np.array([i not in (0, 10, 30, 50, 75) and i - 1 not in (4, 40, 60) for i in range(90)])
    sums = part_sums.of_rows(few, Classes(*np.zeros((2, 4), np.int64), *np.zeros((3, 4), bool)), 1)
    own = sums["surprisal_classes"].filter(pc.field("own") & (pc.field("layer") == 0))
    assert pc.sum(own["tokens"]).as_py() == (known & (few.flags == 0)).sum()
    by_token = sums["tokens"].to_pandas().groupby("token_id")[["surprisal_tokens", "surprisal_sum"]].sum()
    for token, row in by_token.iterrows():
        here = np.flatnonzero(known & (few.token == token))
        assert row.tolist() == [len(here), int((few.loss[here - 1] * 2**24).sum())]


def test_squares_past_64_bits_are_refused(made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made.make(tmp_path / "run", sequences=8, parts=2)
    monkeypatch.setattr(token_sums, "MOST", 1e6)
    with pytest.raises(UserError, match=r"Expected sums of squared nnz below 2\^63, got .* It is in .*part-00000"):
        ensure(run)
    monkeypatch.undo()
    assert len(open_summaries(open_run(run.path)).frame("tokens"))


def test_parts_are_added_up_before_they_are_many(
    questions: ModuleType, made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twell.analysis.engines import accumulate

    run, other = (made.make(tmp_path / name, sequences=60, parts=6) for name in ("one", "other"))
    ensure(run)
    sizes: list[int] = []
    real = accumulate._merged
    monkeypatch.setattr(accumulate, "_merged", lambda name, pieces: sizes.append(len(pieces)) or real(name, pieces))
    monkeypatch.setattr(accumulate, "PENDING", 0)
    ensure(other)
    assert max(sizes) < 6
    questions.same(run, other)
