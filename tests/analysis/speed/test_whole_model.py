"""The whole model of a bench, dense and sparse side by side: what is compared with what, and what is left out."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from twell.analysis import whole_model
from twell.analysis.speed.whole_model import meanings
from twell.workbench.bench.table import Sheet
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run, open_run

ABOUT = {
    "d_model": 64,
    "d_ff": 512,
    "dtype": "float32",
    "weights": "warm",
    "tile": 256,
    "compression": 8,
    "device": "made",
    "commit": "0",
    "ffn": "gated",
    "graph": False,
    "repeats": 5,
    "input": "text",
    "layer": -1,
    "rows": 64,
    "nnz_mean": 12.0,
}
ON_TEXT = "whole model on text, 64 rows"


def measured(op: str, took: tuple[float, float, float], millijoules: float | None = None, **more: Any) -> list[Any]:
    """Return the rows of an operation on 640 tokens. took: µs, the median, shortest and longest turn"""
    kernel = "cpu" if "sparse" in op else "torch"
    base = {**ABOUT, "case": ON_TEXT, "op": op, "kernel": kernel, **more}
    median, low, high = took
    figures: list[tuple[str, str, list[float | None]]] = [
        ("microseconds", "µs", [median, low, high]),
        ("tokens_per_second", "tokens/s", [640e6 / median, 640e6 / high, 640e6 / low]),
    ]
    if millijoules:
        figures.append(("millijoules_per_token", "mJ", [millijoules, None, None]))
    ends = ("value", "low", "high")
    return [
        {**base, "metric": metric, "unit": unit, **dict(zip(ends, values, strict=True))}
        for metric, unit, values in figures
    ]


@pytest.fixture
def run(made: ModuleType, tmp_path: Path) -> Run:
    """A run whose bench has layers, and no whole model yet."""
    made.make(tmp_path / "whole", d_ff=512, sequences=4)
    Sheet(tmp_path / "whole").add(measured("ffn_dense", (100.0,) * 3, case="layer 0 on text", layer=0))
    return open_run(tmp_path / "whole")


def test_both_sides_stand_side_by_side(run: Run) -> None:
    """Dense over sparse time, tokens a second, energy; turns that touch do not tell which side is faster."""
    rows = measured("whole_dense_compiled", (300.0, 290.0, 310.0), 4.0)
    rows += measured("whole_sparse_compiled", (200.0, 190.0, 210.0), 3.0)
    rows += measured("step_dense", (90.0, 60.0, 99.0), case="whole model, decoding 1 sequence", rows=1)
    rows += measured("step_sparse", (60.0, 50.0, 61.0), case="whole model, decoding 1 sequence", rows=1)
    Sheet(run.path).add(rows)
    frame = whole_model(open_run(run.path))
    assert frame[["case", "operation"]].to_numpy().tolist() == [
        ["on text, 64 rows", "whole, compiled"],
        ["decoding 1 sequence", "step"],
    ]
    assert frame["speedup"].tolist() == [1.5, 1.5]
    assert frame["apart"].tolist() == [True, False], "dense's fastest step of 60 µs is no slower than a sparse one"
    rates = [f"{side}_tokens{end}" for side in ("dense", "sparse") for end in ("", "_low", "_high")]
    expected = [640e6 / time for time in (300, 310, 290, 200, 210, 190)]
    assert frame.loc[0, rates].tolist() == pytest.approx(expected)
    assert frame["energy_change"].tolist() == pytest.approx([-0.25, math.nan], nan_ok=True)
    assert frame["kernel"].tolist() == ["cpu", "cpu"] and frame["repeats"].tolist() == [5, 5]
    assert list(meanings(frame)) == ["whole", "compiled", "step"]


def test_devices_and_other_models_are_not_mixed(run: Run) -> None:
    sheet = Sheet(run.path)
    for device, dense in (("one", 300.0), ("other", 400.0)):
        rows = measured("step_dense", (dense,) * 3, device=device)
        sheet.add(rows + measured("step_sparse", (200.0,) * 3, device=device))
    wider = measured("step_dense", (1.0,) * 3, d_ff=1024) + measured("step_sparse", (1.0,) * 3, d_ff=1024)
    sheet.add(wider)
    frame = whole_model(open_run(run.path))
    assert dict(zip(frame["device"], frame["speedup"], strict=True)) == {"one": 1.5, "other": 2.0}


def test_a_run_without_whole_models_says_how_to_time_them(run: Run) -> None:
    with pytest.raises(Missing, match=r"twell bench MODEL --whole --out RUN"):
        whole_model(run)
