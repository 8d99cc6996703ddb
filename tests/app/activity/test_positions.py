"""The Positions page: a fitted curve stands where its length does."""

from __future__ import annotations

import numpy as np
import pytest

from twell.analysis import position_fit
from twell.analysis.figures import positions
from twell.workbench.run.store import Run


def test_a_fit_is_drawn_where_it_has_a_length(made_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = position_fit(made_run).assign(verdict="either", decay_high=9.0)
    fits.loc[1, "decay_high"] = np.inf
    monkeypatch.setattr(positions, "position_fit", lambda _: fits)
    drawn = positions.position_bins(made_run).dropna(subset="fit")["layer"].unique()
    assert 1 not in drawn and set(drawn) <= set(positions.described(fits)["layer"]) and len(drawn) > 1
