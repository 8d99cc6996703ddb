"""The figure of a bench by layer."""

from __future__ import annotations

import pandas as pd

from twell.analysis.figures.labels import times
from twell.analysis.figures.speed.bench import time_by_layer


def test_layers_that_were_left_out_take_no_room() -> None:
    layers = [0, 1, 27]
    frame = pd.concat(
        pd.DataFrame({"layer": layers, "operation": name, "us": us, "low": us, "high": us, "repeats": 3}).assign(
            speedup=100 / us, nnz_mean=9.0, sparse=name != "dense"
        )
        for name, us in (("dense", 100.0), ("hopper kernel", 40.0))
    )
    figure = time_by_layer(frame)
    assert [list(trace.y) for trace in figure.data] == [[0, 1, 2]] * 2
    assert list(figure.layout.yaxis.ticktext) == ["L0", "L1", "L27"]
    assert [(note.y, note.text) for note in figure.layout.annotations] == [(line, times(2.5)) for line in (0, 1, 2)]
    assert figure.data[0].customdata[2][3] == 27
