"""The nearest of all neurons that never fired, wherever they stand in the list that is shown in part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest
from support.page_elements import markup

from twell.analysis import by_neuron
from twell.app.neurons.neuron_data import MAX_ROWS, first_rows, neuron_list
from twell.app.ui.formatting import whole

LAYERS, D_FF = 3, 2048


def test_the_nearest_are_taken_from_all_of_them(
    show: Callable[..., AppTest], made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The three nearest are the last of the last layer; before, only the first thousand of the first were looked at."""
    run = made.make(tmp_path / "many", layers=LAYERS, d_ff=D_FF, sequences=20)
    layer, neuron = (axis.ravel() for axis in np.mgrid[:LAYERS, :D_FF])
    last = (layer == LAYERS - 1) & (neuron >= D_FF - 3)
    largest = np.where(last, -0.1 - 0.1 * (D_FF - 1 - neuron), -5.0)
    nearest = pd.DataFrame({"layer": layer, "neuron": neuron, "largest": largest, "mean": -6.0, "sd": 1.0})
    nearest.to_parquet(path := tmp_path / "nearest.parquet")
    monkeypatch.setattr("twell.app.neurons.near_view.near_values", lambda _run: str(path))
    test = show(tmp_path, "neurons", run="many", kind="dead")
    assert not test.exception
    silent = int((by_neuron(run)["fires"] == 0).sum())
    assert silent > MAX_ROWS
    table = test.dataframe[0].value
    assert table["label"].head(3).tolist() == [f"L{LAYERS - 1}/N{D_FF - 1 - index}" for index in range(3)]
    assert len(table) == MAX_ROWS
    shown = markup(test)
    assert f"{whole(silent)} neurons in all layers (nearest {whole(MAX_ROWS)} shown)" in shown
    assert f"{whole(3)} came within one standard deviation of firing, {whole(silent - 3)} did not" in shown


def test_a_list_that_is_cut_tells_how_long_it_was(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "many", layers=2, sequences=10)
    every = neuron_list(run, None, "dead", most=None)
    assert every.attrs["count"] == len(every) == int((by_neuron(run)["fires"] == 0).sum())
    cut = first_rows(every, 2)
    assert (len(cut), cut.attrs["count"]) == (2, len(every))
    assert first_rows(cut, None).attrs["count"] == len(every), "a list that was cut before is no whole one"
