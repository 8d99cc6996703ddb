"""Totals of partial sums against pandas, and rows in the order of their keys."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from twell.analysis.engines import accumulate
from twell.analysis.summaries.build import _sorted_by_keys
from twell.workbench.run.schema import SUMMARIES

NAME, KEYS = "surprisal_classes", ["layer", "own", "class", "replicate", "loss_class", "nnz_class"]


def partial(seed: int, far: int = 1) -> pa.Table:
    """Return sums as a part has them, each key once; far: how far apart their classes lie."""
    rng = np.random.default_rng(seed)
    keys = pd.DataFrame({name: rng.integers(-1, 5, 4000) * (far if name == "nnz_class" else 1) for name in KEYS})
    keys["own"] = keys["own"] > 1
    keys = keys.drop_duplicates().astype({"layer": np.int32, "replicate": np.int8})
    sums = {"tokens": rng.integers(0, 50, len(keys)), "nnz_sum": rng.integers(-(2**62), 2**60, len(keys))}
    return pa.Table.from_pandas(keys.assign(**sums), preserve_index=False)


def in_order(table: pa.Table) -> pd.DataFrame:
    return table.to_pandas().sort_values(KEYS, ignore_index=True)


@pytest.mark.parametrize("far", [1, 10**9], ids=["close", "apart"])
def test_totals(far: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact to the last bit past 2^53, with the types that a group-by gives, whichever of the two adds them up."""
    pieces, ways = [partial(seed, far) for seed in range(7)], []
    summed = accumulate._summed

    def noted(*arguments: object) -> pa.Table | None:
        ways.append(summed(*arguments))  # type: ignore[arg-type]
        return ways[-1]

    monkeypatch.setattr(accumulate, "_summed", noted)
    total = accumulate.Total()
    for piece in pieces:
        total.add({NAME: piece})
    table = total.table(NAME)
    (way,) = ways
    assert (way is None) == (far > 1)
    expected = pd.concat([piece.to_pandas() for piece in pieces]).groupby(KEYS)[["tokens", "nnz_sum"]].sum()
    pd.testing.assert_frame_equal(in_order(table), expected.reset_index(), check_dtype=False)
    assert table.schema.types == pieces[0].schema.types
    assert far > 1 or in_order(table).equals(table.to_pandas()), "rows in the order of their keys"


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.slice(0, 0),
        lambda table: table.set_column(6, "tokens", pa.array(np.ones(len(table)))),
        lambda table: table.set_column(2, "class", pa.array(["a"] * len(table))),
    ],
    ids=["empty", "fractions", "text"],
)
def test_what_is_left_to_a_group_by(change: Callable[[pa.Table], pa.Table]) -> None:
    table = change(partial(0).select([*KEYS, "tokens"]))
    assert accumulate._summed([table, table], KEYS) is None
    assert len(accumulate.added_up({NAME: table}, {NAME: table})[NAME]) == len(table.group_by(KEYS).aggregate([]))


def test_summaries_are_sorted_by_their_keys() -> None:
    """By numbers, bools and text, negative and large numbers among them, as pyarrow sorts them."""
    rng = np.random.default_rng(3)
    table = pa.table(
        {
            "layer": rng.integers(-1, 3, 3000, dtype=np.int32),
            "own": rng.random(3000) < 0.5,
            "class": rng.choice(["b", "Ä", "a a", "", "a"], 3000),
            "nnz_class": rng.integers(-(2**40), 2**40, 3000),
            "loss_class": rng.integers(0, 2**20, 3000, dtype=np.uint32),
            "replicate": np.arange(3000),
        }
    )
    keys = SUMMARIES.tables[NAME].keys
    for few in (table, table.slice(0, 1), table.slice(0, 0), pa.concat_tables([table.slice(7), table.slice(0, 7)])):
        assert _sorted_by_keys(few, keys).equals(few.sort_by([(key, "ascending") for key in keys]).combine_chunks())
    repeated = pa.concat_tables([table.select(keys[:3]).slice(0, 50)] * 3)
    assert _sorted_by_keys(repeated, keys[:3]).equals(repeated.sort_by([(key, "ascending") for key in keys[:3]]))
