"""The summary of highest places: what a search of all rows finds, to the last place, and no row is read for it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

from twell.analysis import ensure
from twell.analysis.passage import PHASES, loudest, shades
from twell.analysis.tokens.highest import ORDER, SEEN
from twell.workbench.run.schema import SUMMARIES, nnz_columns
from twell.workbench.run.store import Run, open_run

Columns = dict[str, Any]
PLACE = ["sequence", "position", "token_id", "value"]


def as_drawn(columns: Columns) -> Columns:
    return columns


def alike(columns: Columns) -> Columns:
    """Most rows have the greatest count of a layer, and layer 1 is dead."""
    return columns | {name: np.minimum(columns[name], int(name == "nnz_00") * 2) for name in nnz_columns(3)}


def one_token(columns: Columns) -> Columns:
    """One token has all of the greatest counts of a part, so that others are found far below."""
    total = sum(columns[name].astype(int) for name in nnz_columns(3))
    token = np.where(total > np.quantile(total, 0.2), 7, columns["token_id"])
    return columns | {"token_id": token.astype(np.int32)}


def few_tokens(columns: Columns) -> Columns:
    """There are fewer tokens than are listed."""
    return columns | {"token_id": columns["token_id"] % (SEEN - 3)}


def two_phases(columns: Columns) -> Columns:
    return columns | {"phase": (columns["position"] >= 20).astype(np.uint8)}


def out_of_order(columns: Columns) -> Columns:
    """Rows of a part stand in any order, as those of a batch of generated sequences do."""
    order = np.random.default_rng(4).permutation(len(columns["token_id"]))
    return {name: values[order] for name, values in columns.items()}


def all_flagged(columns: Columns) -> Columns:
    return columns | {"flags": np.full_like(columns["flags"], 1)}


CHANGES = (as_drawn, alike, one_token, few_tokens, two_phases, out_of_order, all_flagged)


def searched(run: Run, shade: str, phase: str | None) -> pd.DataFrame:
    """Return the places as a search of all rows finds them."""
    rows = run.frame("activity").astype(dict.fromkeys(nnz_columns(run.layers), "int64"))
    names = nnz_columns(run.layers) if shade == "all" else [nnz_columns(run.layers)[int(shade[1:])]]
    rows = rows[(rows["flags"] == 0) & (True if phase is None else rows["phase"] == PHASES[phase])]
    rows = rows.assign(value=rows[names].sum(axis=1)).sort_values(ORDER, ascending=[False, True, True])
    return rows.drop_duplicates("token_id").head(SEEN)[PLACE].astype("int64").reset_index(drop=True)


def assert_found(run: Run, read: list[str]) -> None:
    """Compare every nnz shade and phase with a search; the rows of the layers are read for none of them."""
    for shade in (shade for shade in shades(run) if shade != "surprisal"):
        for phase in (None, *PHASES):
            expected = searched(run, shade, phase)
            read.clear()
            pd.testing.assert_frame_equal(loudest(run, shade, phase)[PLACE], expected, check_dtype=len(expected) > 0)
            assert "activity" not in read, shade


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by the name of each table whose parts are read whole."""
    tables, real = [], Run.pieces

    def noted(run: Run, table: str = "activity", *columns: Any) -> Any:
        tables.append(table)
        return real(run, table, *columns)

    monkeypatch.setattr(Run, "pieces", noted)
    return tables


@pytest.mark.parametrize("change", CHANGES)
def test_the_places_are_those_of_a_search(made: ModuleType, tmp_path: Path, read: list[str], change: Any) -> None:
    run = made.make(tmp_path / "run", layers=3, sequences=60, change=change)
    ensure(run)
    assert_found(run, read)


def test_without_summaries_the_rows_are_searched(made: ModuleType, tmp_path: Path, read: list[str]) -> None:
    """As in a reading of one's own text, which is too short to be summarised for this."""
    run = made.make(tmp_path / "run", layers=2, sequences=40, change=out_of_order)
    for shade in ("all", "L1"):
        pd.testing.assert_frame_equal(loudest(run, shade)[PLACE], searched(run, shade, None))
    assert "activity" in read and not run.summary_path("highest").exists()


def test_summaries_of_an_earlier_revision_are_built_once(made: ModuleType, tmp_path: Path, read: list[str]) -> None:
    """A run that was summarised before there was this table opens, from its rows until its page builds it."""
    run = made.make(tmp_path / "run", layers=2, sequences=40)
    ensure(run)
    expected = loudest(run, "all")
    (highest := run.summary_path("highest")).unlink()
    built = json.loads((highest.parent / "built.json").read_text())
    del built["sha256"], built["files"]["highest"]
    (highest.parent / "built.json").write_text(json.dumps(built | {"revision": SUMMARIES.revision - 1}))
    pd.testing.assert_frame_equal(loudest(run, "all"), expected)
    assert "activity" in read
    ensure(run)
    assert_found(run, read)


@pytest.mark.parametrize("change", [as_drawn, few_tokens])
def test_a_part_that_comes_is_added(made: ModuleType, tmp_path: Path, read: list[str], change: Any) -> None:
    """And a reader who does not know of it yet finds what stands in the parts that it knows."""
    shape, rng = made.Shape(layers=2, sequences=48, of_document=5, timings=0), np.random.default_rng(1)
    columns = change(made.draw(shape))
    writer = made.RunWriter(tmp_path / "live", made.manifest(shape))
    writer.add("vocab", made.vocabulary(shape.vocab))
    known = []
    for number in range(4):  # a document of five sequences goes on in the next part
        rows = columns["sequence"] // 12 == number
        made.add_part(writer, shape, {name: values[rows] for name, values in columns.items()}, rng)
        writer.drain()
        known.append(open_run(tmp_path / "live"))
        ensure(known[-1], scored=False)
        assert_found(known[-1], read)
    pd.testing.assert_frame_equal(loudest(known[1], "all")[PLACE], searched(known[1], "all", None))
    writer.finish()
    ensure(open_run(tmp_path / "live"))
    assert_found(open_run(tmp_path / "live"), read)
