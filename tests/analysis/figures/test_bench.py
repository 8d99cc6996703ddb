"""The figure of a bench by layer."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest

from twell.analysis import ffn_speedup
from twell.analysis.figures.labels import times
from twell.analysis.figures.speed import bench_beside
from twell.analysis.figures.speed.bench import time_by_layer
from twell.analysis.figures.speed.bench_beside import beside_bench, beside_capture
from twell.workbench.run.store import Run


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
    lines, room = figure.layout.xaxis.title.text.split("<br>"), figure.layout.margin
    assert 6 * max(map(len, lines)) < 345 - room.l - room.r, "pixels of a phone"


def test_bench_and_capture_say_why_they_differ(run: Run, made: ModuleType, tmp_path: Path) -> None:
    """The synthetic bench times layers 0 and 3: dense 100 µs, compression 8, the run's own, 50 and 53."""
    assert run.manifest.layout["compression"] == 8
    said, own = beside_capture(run), ffn_speedup(run)
    assert said.startswith(f"twell bench found {times(200 / 103)}, of 2 of 4 layers (L0, L3) at 64 rows a call: ")
    assert beside_bench(run).startswith(f"The capture's FFN speedup is {times(own['speedup'])}: ")
    why = said.partition(": ")[2]
    assert beside_bench(run).endswith(why) and f"in {own['turns']} batches of " in why and "all 4 layers" in why
    assert beside_capture(made.make(tmp_path / "plain", sequences=10, parts=1)) == "", "without a bench"
    untimed = made.make(tmp_path / "untimed", layers=4, sequences=10, parts=1, bench=True, timings=0)
    alone = f"twell bench found {times(200 / 103)}, of 2 of 4 layers (L0, L3) at 64 rows a call."
    assert (beside_capture(untimed), beside_bench(untimed)) == (alone, ""), "what a capture without timings has"
    reference = made.make(tmp_path / "oracle", sequences=10, parts=1, kernel="reference", bench=True)
    assert beside_capture(reference) == beside_bench(reference) == "", "no speedup is claimed from the reference"


def test_without_timings_the_case_of_most_layers_speaks(
    made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever number of rows it has."""
    untimed = made.make(tmp_path / "untimed", layers=4, sequences=10, parts=1, bench=True, timings=0)
    most, fewer = range(4), [0, 1]
    cases = [(rows, layer) for rows, layers in ((64, fewer), (512, most), (4096, fewer)) for layer in layers]
    frame = pd.DataFrame(cases, columns=["rows", "layer"]).assign(us=50.0, speedup=2.0, setting="one")
    monkeypatch.setattr(bench_beside, "_own_cases", lambda _: frame)
    assert bench_beside.bench_speedup(untimed) == (2.0, "all 4 layers at 512 rows a call")
