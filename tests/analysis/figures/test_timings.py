"""Figures of times: labels beside one another, units that read well, shares of what is drawn. Cost: none."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from twell.analysis.figures.speed.kernels import time_split
from twell.analysis.figures.speed.timings import speedup_by_nnz, time_unit


def test_labels_of_neighbours_stand_beside_one_another() -> None:
    """Layers 1 and 2 lie close together and below their neighbour 3, so that both labels stand under their dots."""
    layers = {"layer": range(5), "nnz_mean": [150.0, 10.0, 9.0, 9.26, 40.0], "speedup": [0.4, 0.85, 0.92, 1.05, 0.9]}
    (dots,) = speedup_by_nnz(pd.DataFrame(layers | {"low": np.nan, "high": np.nan})).data
    placed = dict(zip(dots.text, dots.textposition, strict=True))
    assert placed == {
        "L2": "bottom left",
        "L3": "top right",
        "L1": "bottom right",
        "L4": "top right",
        "L0": "top right",
    }


@pytest.mark.parametrize(("longest", "unit"), [(900, "µs"), (7_000, "ms"), (18_000, "ms"), (2_500_000, "s")])
def test_units_have_few_digits(longest: float, unit: str) -> None:
    assert time_unit(longest)[0] == unit


def test_parts_that_took_longer_than_the_pass_have_shares_of_their_sum() -> None:
    parts = {"part": ["ffn", "attention", "rest", "whole"], "dense_us": [600.0, 900.0, -500.0, 1000.0]}
    figure = time_split(pd.DataFrame(parts | {"sparse_us": [200.0, 500.0, 100.0, 800.0]}))
    assert [trace.text[0] for trace in figure.data] == ["FFN 40\u202f%", "attention 60\u202f%", ""]
    assert [trace.text[1] for trace in figure.data] == ["FFN 25\u202f%", "attention 62\u202f%", "rest 12\u202f%"]
    assert figure.layout.xaxis.title.text.endswith("ms")
    np.testing.assert_allclose([trace.x[0] for trace in figure.data], [0.6, 0.9, 0])
