"""The whole model of a bench, dense and sparse side by side: what is compared with what, and what is left out."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from twell.analysis import whole_model
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, UNTOLD
from twell.analysis.claims.speed import energy, faster, up_to_thirty
from twell.analysis.figures.labels import SPACE
from twell.analysis.figures.speed.whole_beside import whole_beside
from twell.analysis.speed.whole_model import meanings, pass_on_text
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


def test_a_pass_on_text_has_an_interval_from_seven_turns_on(run: Run) -> None:
    """By the ranges of both sides: the shortest of one over the longest of the other."""
    for turns, uniform in ((6, False), (7, True), (7, False)):
        more = {"repeats": turns} | ({"case": "whole model on uniform ids, 64 rows"} if uniform else {})
        rows = measured("whole_dense", (300.0, 290.0, 310.0), 4.0, **more)
        assert pass_on_text(open_run(run.path)) is None
        Sheet(run.path).add(rows + measured("whole_sparse", (200.0, 190.0, 210.0), 3.0, **more))
    timed = pass_on_text(open_run(run.path))
    assert timed is not None and timed["repeats"] == 7 and timed["mean"] == 1.5 and timed["energy"] == 0.75
    assert (timed["mean_low"], timed["mean_high"]) == pytest.approx((290 / 210, 310 / 190))


def test_what_it_is_worth_in_a_sentence(run: Run) -> None:
    """The longest pass and steps in order, of the device that was timed last; and what turns do not tell."""
    assert whole_beside(run) == ""
    rows = [row for side in ("dense", "sparse") for row in measured(f"whole_{side}", (9.0,) * 3, device="other")]
    for tokens, gain in ((64, 2.0), (128, 1.5)):
        case = {"case": f"whole model on text, {tokens} rows", "rows": tokens}
        rows += measured("whole_dense", (gain * 100,) * 3, **case) + measured("whole_sparse", (100.0,) * 3, **case)
    compiled = {"case": "whole model on text, 128 rows", "rows": 128}
    rows += measured("whole_dense_compiled", (125.0, 90.0, 130.0), **compiled)
    rows += measured("whole_sparse_compiled", (100.0, 95.0, 105.0), **compiled)
    for number, gain in ((64, 1.1), (1, 1.4)):
        case = {"case": f"whole model, decoding {number} sequence{'s' * (number > 1)}", "rows": number}
        rows += measured("step_dense", (gain * 100,) * 3, **case) + measured("step_sparse", (100.0,) * 3, **case)
    Sheet(run.path).add(rows)
    assert whole_beside(open_run(run.path)).replace(SPACE, " ") == (
        "The whole model by twell bench, dense time / sparse time on made: a forward pass 1.50 × eager, 1.25 × (not "
        "told from 1 × by its turns) compiled; a step of decoding 1.40 × for 1 sequence, 1.10 × for 64 sequences."
    )


@pytest.mark.parametrize(
    ("sparse", "verdicts"),
    [
        ((200.0, 190.0, 210.0), (HOLDS, HOLDS, HOLDS)),
        ((240.0, 235.0, 245.0), (HOLDS, IN_PART, HOLDS)),
        ((260.0, 250.0, 310.0), (UNTOLD, FAILS, HOLDS)),
    ],
)
def test_claims_on_the_pass_take_the_bench_where_batches_are_too_few(
    run: Run, sparse: tuple[float, float, float], verdicts: tuple[str, ...]
) -> None:
    run.manifest.model["parameters"] = 1.6e9
    with pytest.raises(Missing, match="did not time the whole forward pass"):
        faster(run)
    rows = measured("whole_dense", (300.0, 295.0, 305.0), 4.0, repeats=7)
    Sheet(run.path).add(rows + measured("whole_sparse", sparse, 3.0, repeats=7))
    again = open_run(run.path)
    again.manifest.model["parameters"] = 1.6e9
    answers = [check(again) for check in (faster, up_to_thirty, energy)]
    assert tuple(answer.verdict for answer in answers) == verdicts
    assert "7 turns a side; kernel cpu, 64 rows in twell bench, float32" in answers[0].statistic
    assert answers[2].says == "a token takes 25 % less energy" and "n = 1 window" in answers[2].statistic
