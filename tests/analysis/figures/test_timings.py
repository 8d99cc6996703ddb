"""Figures of times: labels beside one another, units that read well, shares of what is drawn. Cost: none."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from twell.analysis.figures.labels import times
from twell.analysis.figures.speed.compressions import time_map
from twell.analysis.figures.speed.kernels import time_split
from twell.analysis.figures.speed.live import times_and_nnz
from twell.analysis.figures.speed.timings import dense_and_sparse, over_batches, speedup_by_nnz, summed, time_unit
from twell.analysis.figures.style import BLUE, GREY


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


@pytest.mark.parametrize(("longest", "unit"), [(999, "µs"), (1_000, "ms"), (999_999, "ms"), (1_000_000, "s")])
def test_units_have_few_digits(longest: float, unit: str) -> None:
    assert time_unit(longest)[0] == unit


def test_parts_that_took_longer_than_the_pass_have_shares_of_their_sum() -> None:
    parts = {"part": ["ffn", "attention", "rest", "whole"], "dense_us": [600.0, 900.0, -500.0, 1000.0]}
    figure = time_split(pd.DataFrame(parts | {"sparse_us": [200.0, 500.0, 100.0, 800.0]}))
    assert [trace.text[0] for trace in figure.data] == ["FFN 40\u202f%", "attention 60\u202f%", ""]
    assert [trace.text[1] for trace in figure.data] == ["FFN 25\u202f%", "attention 62\u202f%", "rest 12\u202f%"]
    assert figure.layout.xaxis.title.text.endswith("ms")
    np.testing.assert_allclose([trace.x[0] for trace in figure.data], [0.6, 0.9, 0])
    np.testing.assert_allclose([trace.x[1] for trace in figure.data], [0.2, 0.5, 0.1])
    assert {trace.y for trace in figure.data} == {("dense", "sparse")}


def test_dense_and_sparse_dots_are_where_the_legend_says() -> None:
    """Grey rings are dense, blue dots sparse, in milliseconds; the ratio is grey where its interval holds 1."""
    columns = {"dense_us": [2000.0, 900.0], "sparse_us": [1000.0, 1000.0], "speedup": [2.0, 0.9]}
    frame = pd.DataFrame({"layer": [0, 3], **columns, "low": [1.92, 0.81], "high": [2.14, 1.12]})
    figure = dense_and_sparse(frame, ratios=True)
    _, dense, sparse = figure.data
    assert (list(dense.x), list(dense.y), dense.marker.color) == ([2.0, 0.9], [0, 3], GREY)
    assert (list(sparse.x), list(sparse.y), sparse.marker.color) == ([1.0, 1.0], [0, 3], BLUE)
    assert ", dense: " in dense.hovertemplate and ", sparse: " in sparse.hovertemplate
    legend, first, second = (note.text for note in figure.layout.annotations)
    assert [color in part for part, color in zip(legend.split("   "), (GREY, BLUE), strict=True)] == [True, True]
    assert re.sub("<[^>]*>", "", legend) == "○ dense   ● sparse"
    assert re.sub("<[^>]*>", "", first) == f"{times(2.0)} 1.92–2.14" and GREY not in first
    assert re.sub("<[^>]*>", "", second) == f"{times(0.9)} 0.810–1.12" and GREY in second
    assert figure.layout.xaxis.title.text == "ms per batch, median"


@pytest.mark.parametrize(("high", "top"), [(3.0, 3.0), (90.0, 4.0), (np.nan, 2.0)])
def test_intervals_have_room_up_to_twice_the_fastest_layer(high: float, top: float) -> None:
    frame = pd.DataFrame({"layer": [0, 1], "nnz_mean": [5.0, 50.0], "speedup": [2.0, 1.5]})
    figure = speedup_by_nnz(frame.assign(low=np.where(np.isnan(high), np.nan, 1.0), high=[high, np.nan]))
    assert figure.layout.yaxis.range[1] == pytest.approx(1.15 * top)


def test_times_of_the_batches_of_a_round_are_scaled_to_its_largest_and_added() -> None:
    """Layer 0 took 10 µs for 50 tokens, layer 1 12 µs for 100; the second round lacks layer 1."""
    columns = ("batch", "layer", "op", "tokens", "microseconds")
    rows = [(1, 0, "ffn_dense", 50, 10.0), (2, 1, "ffn_dense", 100, 12.0), (3, 0, "ffn_dense", 100, 9.0)]
    sums = summed(pd.DataFrame(rows, columns=columns))
    assert sums.to_numpy().tolist() == [[2, "dense", 100, 32.0]]
    (line,) = over_batches(sums).data
    assert (list(line.x), list(line.y), line.line.color) == ([2], [320.0], GREY), "ns a token"


def test_milliseconds_stand_above_nnz_over_one_axis_of_time() -> None:
    columns = {"seconds": [1.0, 2.0, 1.0, 2.0], "layer": [0, 0, 5, 5], "ms": [3.0, 4.0, 5.0, 6.0]}
    figure = times_and_nnz(pd.DataFrame(columns | {"nnz_mean": [30.0, 40.0, 50.0, 60.0], "tokens": 64}))
    drawn = [(line.yaxis, list(line.x), list(line.y)) for line in figure.data]
    seconds = [1.0, 2.0]
    assert drawn == [
        ("y", seconds, [3, 4]),
        ("y2", seconds, [30, 40]),
        ("y", seconds, [5, 6]),
        ("y2", seconds, [50, 60]),
    ]
    assert (figure.layout.yaxis.title.text, figure.layout.yaxis2.title.text) == (
        "ms of a sparse FFN",
        "nnz of that call",
    )
    assert figure.layout.yaxis.domain[0] > figure.layout.yaxis2.domain[1]
    notes = {(note.text, note.yref, note.y) for note in figure.layout.annotations}
    assert notes == {("L0", "y", 4), ("L5", "y", 6), ("L0", "y2", 40), ("L5", "y2", 60)}


def test_times_by_compression_are_shaded_by_the_shortest_time_of_their_layer() -> None:
    """Whatever is fastest and safe is marked; of others, which share of rows overflows a tile, and where."""
    columns = {"layer": [0, 0, 1, 1], "compression": [4, 8, 4, 8], "slots": [63, 31, 63, 31]}
    shares = {"past_share": [0.0, 0.25, 0.0, 0.0], "rows_over_share": [0.0, 0.5, 0.0, 0.125]}
    safe = {"safe": [True, False, True, False], "fastest": [True, False, True, False]}
    (cells,) = time_map(pd.DataFrame(columns | shares | safe | {"microseconds": [200.0, 100.0, 30.0, 60.0]})).data
    assert cells.z.tolist() == [[2, 1], [1, 2]] and cells.y == (0, 1) and cells.zmax == 2
    said = [[text.replace("\u202f", " ") for text in line] for line in cells.text]
    assert said == [["✓ 200 µs", "100 µs (25 %)"], ["✓ 30.0 µs", "60.0 µs (12 % of the run)"]]
