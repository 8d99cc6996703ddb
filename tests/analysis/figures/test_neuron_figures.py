"""The histogram of a neuron's values, and the logarithmic axes of figures of tables of neurons."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from twell.analysis.figures.compare import trainings_side_by_side
from twell.analysis.figures.labels import number
from twell.analysis.figures.neurons import value_bars, value_distribution
from twell.analysis.figures.table_plots import by_neuron
from twell.analysis.neurons.value_histogram import BEGINS


def test_the_mean_and_the_largest_value_are_written_apart_however_near_they_are() -> None:
    notes = value_distribution(np.linspace(2.9, 3.0, 400), 2.95, 3.0).layout.annotations
    assert [note.text.split()[0] for note in notes] == ["mean", "largest"]
    assert abs(notes[0].yshift - notes[1].yshift) >= notes[0].font.size + 2


@pytest.mark.parametrize("values", [[2, 5, 30, 400, 3000], [2, 3, 12], [2, 2, 2], []])
def test_a_logarithmic_axis_says_20_and_200_where_plotly_would_say_2(values: list[int]) -> None:
    at = np.asarray(values, float)
    table = pd.DataFrame({"neurons": at, "sequences": at, "lag": at, "layer": 0, "window": "", "run": "a", "tokens": 9})
    table[["phi", "dead_share", "shared", "served", "loss", "dead", "tokens_per_second"]] = 0.5
    table["nnz"] = at
    axes = [getattr(by_neuron, name)(table).layout.xaxis for name in ("clusters", "dead", "lags", "cache")]
    axes.append(trainings_side_by_side(table, "a").layout.yaxis2)
    for axis in axes:
        assert axis.type == "log"
        assert list(axis.ticktext) == [number(tick, 1) for tick in axis.tickvals]
        assert len(axis.ticktext) >= min(3, len(set(values)))


@pytest.mark.parametrize(("bins", "labels"), [(6, 3), (20, 5)])
def test_values_over_many_doublings_have_labels_that_a_phone_has_room_for(bins: int, labels: int) -> None:
    low = BEGINS[:bins]
    frame = pd.DataFrame({"low": low, "high": BEGINS[1 : bins + 1], "fires": 1, "share": 1 / bins})
    axis = value_bars(frame, float(low[1]), float(low[-1])).layout.xaxis
    assert len(axis.tickvals) == len(axis.ticktext) <= labels + 1
    assert len(axis.tickvals) >= labels
