"""Contexts against the rows and the vocabulary."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from twell.analysis import contexts
from twell.workbench.errors import Missing, UserError
from twell.workbench.store import Run


@pytest.fixture
def places(run: Run, rows: pd.DataFrame, made: ModuleType) -> pd.DataFrame:
    """Where the loud token stands unflagged, with nnz and z."""
    layers = list(range(run.layers))
    plain = rows[rows["flags"] == 0]
    z = ((plain[layers] - plain[layers].mean()) / plain[layers].std(ddof=0)).mean(axis=1)
    frame = plain.assign(nnz=plain[layers].sum(axis=1), z=z)
    frame["percentile"] = [100 * (frame["nnz"] <= nnz).mean() for nnz in frame["nnz"]]
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
    from twell.workbench.store import copy_without_activity, open_run

    run = made.make(tmp_path / "whole", sequences=10, parts=1)
    ensure(run)
    copy_without_activity(run.path, tmp_path / "copy")
    with pytest.raises(Missing, match="summary-only"):
        contexts(open_run(tmp_path / "copy"), 1)
