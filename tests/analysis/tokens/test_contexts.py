"""Contexts against the rows and the vocabulary."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from twell.analysis import contexts, loudest, passages
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run


@pytest.fixture
def places(run: Run, rows: pd.DataFrame, made: ModuleType) -> pd.DataFrame:
    """Where the loud token stands unflagged, with nnz and z."""
    layers = list(range(run.layers))
    plain = rows[rows["flags"] == 0]
    z = ((plain[layers] - plain[layers].mean()) / plain[layers].std(ddof=0)).mean(axis=1)
    frame = plain.assign(nnz=plain[layers].sum(axis=1), z=z)
    frame["percentile"] = 100 * frame["nnz"].rank(method="max", pct=True)
    return frame[frame["token_id"] == made.LOUD]


@pytest.mark.parametrize(
    ("order", "by", "ascending"),
    [
        ("loudest", ["z", "sequence", "position"], [False, True, True]),
        ("quietest", ["z", "sequence", "position"], [True, True, True]),
        ("text", ["sequence", "position"], [True, True]),
    ],
)
def test_contexts(run: Run, places: pd.DataFrame, made: ModuleType, order, by, ascending) -> None:
    table = contexts(run, made.LOUD, limit=15, order=order)
    expected = places.sort_values(by, ascending=ascending).head(15)
    assert list(zip(table["sequence"], table["position"], strict=True)) == list(
        zip(expected["sequence"], expected["position"], strict=True)
    )
    assert list(table["nnz"]) == list(expected["nnz"])
    np.testing.assert_allclose(table["z"], expected["z"], rtol=1e-9)
    np.testing.assert_allclose(table["percentile"], expected["percentile"], rtol=1e-9)
    np.testing.assert_array_equal(table["loss"], expected["loss"])
    assert list(table["document"]) == [number // 2 for number in table["sequence"]]
    assert (table["source"] == "made:text").all()
    assert (table["token"] == " formaldehyde").all()


def test_text_around(run: Run, rows: pd.DataFrame, made: ModuleType) -> None:
    table = contexts(run, made.LOUD, width=5)
    pieces = run.vocab["bytes"]
    for row in table.itertuples():
        line = rows[rows["sequence"] == row.sequence].set_index("position")["token_id"]
        before = b"".join(pieces[line[p]] for p in range(max(0, row.position - 5), row.position))
        after = b"".join(pieces[line[p]] for p in range(row.position + 1, row.position + 6) if p in line.index)
        assert row.before == before.decode("utf-8", errors="replace")
        assert row.after == after.decode("utf-8", errors="replace")


def test_flagged_places_when_asked(bos_run: Run) -> None:
    with pytest.raises(Missing, match="unflagged"):
        contexts(bos_run, 0)
    table = contexts(bos_run, 0, flagged=True)
    assert len(table) == 40
    assert (table["position"] == 0).all()
    assert (table["before"] == "").all()
    assert table["percentile"].between(0, 100).all()


def test_unknown(run: Run) -> None:
    with pytest.raises(Missing, match="does not occur"):
        contexts(run, 12345)
    with pytest.raises(UserError, match="loudest, quietest, text"):
        contexts(run, 1, order="random")  # type: ignore[arg-type]


def test_summary_only(made: ModuleType, tmp_path: Path) -> None:
    from twell.analysis import ensure
    from twell.workbench.run.store import open_run
    from twell.workbench.run.summary_only import copy_without_activity

    run = made.make(tmp_path / "whole", sequences=10, parts=1)
    ensure(run)
    copy_without_activity(run.path, tmp_path / "copy")
    with pytest.raises(Missing, match="summary-only"):
        contexts(open_run(tmp_path / "copy"), 1)


@pytest.fixture
def scored(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    """Every unflagged token with nnz and z."""
    layers = list(range(run.layers))
    plain = rows[rows["flags"] == 0]
    z = ((plain[layers] - plain[layers].mean()) / plain[layers].std(ddof=0)).mean(axis=1)
    return plain.assign(nnz=plain[layers].sum(axis=1), z=z)


@pytest.mark.parametrize(("order", "sign"), [("loudest", -1), ("quietest", 1)])
def test_loudest_places(run: Run, scored: pd.DataFrame, order, sign: int) -> None:
    table = loudest(run, limit=12, order=order)
    expected = scored.assign(key=sign * scored["z"].round(12)).sort_values(["key", "sequence", "position"]).head(12)
    np.testing.assert_allclose(table["z"], expected["z"], rtol=1e-9)
    assert list(table["token_id"]) == list(expected["token_id"])
    assert list(table["nnz"]) == list(expected["nnz"])
    assert [run.decode([token]) for token in table["token_id"]] == [
        text if "�" not in text else run.decode([token])
        for text, token in zip(table["token"], table["token_id"], strict=True)
    ]


@pytest.mark.parametrize(("order", "sign"), [("loudest", -1), ("quietest", 1)])
def test_passages(run: Run, rows: pd.DataFrame, scored: pd.DataFrame, order, sign: int) -> None:
    width = 8
    table = passages(run, width=width, limit=10, order=order)
    scored = scored.assign(start=scored["position"] // width * width)
    means = scored.groupby(["sequence", "start"]).agg(
        n=("z", "size"), z=("z", "mean"), nnz=("nnz", "mean"), loss=("loss", "mean")
    )
    whole = means[means["n"] == width].reset_index()
    expected = whole.assign(key=sign * whole["z"].round(12)).sort_values(["key", "sequence", "start"]).head(10)
    assert (table["position"] > 0).all(), "position 0 is flagged"
    assert list(zip(table["sequence"], table["position"], strict=True)) == list(
        zip(expected["sequence"], expected["start"], strict=True)
    )
    for name in ("z", "nnz", "loss"):
        np.testing.assert_allclose(table[name], expected[name], rtol=1e-9)
    row = table.iloc[0]
    there = rows[(rows["sequence"] == row["sequence"]) & rows["position"].between(row["position"], row["position"] + 7)]
    assert row["text"] == run.decode(there["token_id"].tolist())
    assert row["source"] == "made:text"


def test_passages_longer_than_any_sequence(run: Run) -> None:
    with pytest.raises(Missing, match="shorter passages"):
        passages(run, width=1000)
    with pytest.raises(UserError, match="at least 2"):
        passages(run, width=1)
