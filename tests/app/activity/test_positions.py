"""The Positions page: a fitted curve stands where its length does; a band where an interval does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from twell.analysis import position_fit
from twell.analysis.figures import positions
from twell.workbench.run.store import Run


def test_a_fit_is_drawn_where_it_has_a_length(made_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = position_fit(made_run).assign(verdict="either", decay_high=9.0)
    fits.loc[1, "decay_high"] = np.inf
    monkeypatch.setattr(positions, "position_fit", lambda _: fits)
    drawn = positions.position_bins(made_run).dropna(subset="fit")["layer"].unique()
    assert 1 not in drawn and set(drawn) <= set(positions.described(fits)["layer"]) and len(drawn) > 1


def test_positions_at_which_a_few_documents_are_alike_have_no_band(
    made: ModuleType, tmp_path: Path, show: Callable[..., AppTest]
) -> None:
    def change(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {"nnz_00": np.where(columns["position"] == 3, 7, columns["nnz_00"]).astype(np.uint16)}

    run = made.make(tmp_path / "few", change=change, sequences=6, length=8, layers=2, parts=1)
    bins = positions.position_bins(run).set_index(["layer", "position_from"])
    assert np.isnan(bins.loc[(0, 3), "low"]) and bins.loc[(1, 3), "low"] < bins.loc[(1, 3), "high"]
    test = show(tmp_path, "positions", run="few")
    words = " ".join(str(block.proto.body) for block in test.get("html"))
    assert "intervals as bands, and none where a single document tells, or a few that are alike." in words


def test_the_names_of_lengths_do_not_meet_on_a_phone(made_run: Run) -> None:
    fits = position_fit(made_run).assign(verdict="either", decay=90.0, decay_low=9.0, decay_high=900.0)
    layout = positions.decay_lengths(fits).layout
    (low, high), wide = layout.xaxis.range, 345 - layout.margin.l - layout.margin.r
    places = (np.log10(layout.xaxis.tickvals) - low) / (high - low) * wide
    widths = 6 * np.array([len(name) for name in layout.xaxis.ticktext])  # pixels, at most
    assert len(places) >= 5 and (np.diff(places) > (widths[1:] + widths[:-1]) / 2).all()
