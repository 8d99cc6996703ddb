"""The Kernels page on what `twell bench` measured, and a measurement taken from it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from streamlit.testing.v1 import AppTest
from support.browser_pages import Watched
from support.copied_runs import copy_run
from support.rewritten import relisted

from twell.analysis import tile_settings, whole_model
from twell.analysis.figures.speed.bench_rows import break_even_nnz, by_setting, ffn_times
from twell.analysis.figures.speed.timings import batch_times, over_batches, summed
from twell.app.jobs.measure import KINDS, SHARES, WHOLE_CASES, bench_arguments
from twell.app.jobs.runner import JobRunner
from twell.app.speed.bench_view import total_speedups
from twell.app.speed.compression_view import fastest_kernels, time_map
from twell.workbench.bench.options import BenchOptions
from twell.workbench.bench.table import Sheet
from twell.workbench.run.store import Run, open_run

Show = Callable[..., AppTest]
PLAIN = {
    "d_model": 64,
    "d_ff": 512,
    "dtype": "float32",
    "weights": "warm",
    "tile": 256,
    "device": "made",
    "commit": "0",
    "ffn": "gated",
    "graph": False,
    "repeats": 7,
}


def row(case: str, layer: int, op: str, kernel: str, value: float, **more: Any) -> dict[str, Any]:
    """A row of the bench table: a time, unless it says otherwise."""
    made = {"input": "text", "rows": 1024, "nnz_mean": 20.0, "metric": "microseconds", "unit": "µs"}
    spread = {"low": value * 0.9, "high": value * 1.2, "compression": 0 if kernel == "torch" else 8}
    return {**PLAIN, **made, **spread, "case": case, "layer": layer, "op": op, "kernel": kernel, "value": value, **more}


@pytest.fixture
def benched(runs: Path, tmp_path: Path) -> Run:
    """A copy of the complete run with a bench table: three layers on text, five inputs made up, one of more rows."""
    copy_run(runs / "made", tmp_path / "benched")
    sheet = Sheet(tmp_path / "benched")
    for layer, took in enumerate((100.0, 125.0, 250.0)):
        case = f"layer {layer} on text"
        rows = [row(case, layer, "ffn_dense", "torch", 500.0), row(case, layer, "ffn_fused", "torch", 400.0)]
        rows += [row(case, layer, "ffn_sparse", "cpu", took), row(case, layer, "gate", "torch", 90.0)]
        past = [row(case, layer, "ffn_sparse", "cpu", float(layer == 2), metric="rows_past_slots", unit="rows")]
        sheet.add([*rows, *past, row(case, layer, "ffn_sparse", "cpu", 2e-7, metric="error_max", unit="relative")])
    for nnz, took in ((5, 100.0), (50, 200.0), (100, 400.0), (200, 700.0), (512, 900.0)):
        more = {"input": "dense" if nnz == 512 else "even", "nnz_mean": float(nnz)}
        rows = [row(f"even nnz {nnz}", -1, "ffn_dense", "torch", 500.0, **more)]
        sheet.add([*rows, row(f"even nnz {nnz}", -1, "ffn_sparse", "cpu", took, **more)])
    more = {"input": "heavy", "nnz_mean": 150.0}  # beside the even rows, at another speed
    rows = [row("heavy nnz 150", -1, "ffn_dense", "torch", 500.0, **more)]
    sheet.add([*rows, row("heavy nnz 150", -1, "ffn_sparse", "cpu", 300.0, **more)])
    sheet.add([row("wider", 1, "ffn_dense", "torch", 9.0, d_ff=1024)])
    sheet.add([row("one", 0, op, k, 9.0, rows=64) for op, k in (("ffn_dense", "torch"), ("ffn_sparse", "cpu"))])
    return open_run(tmp_path / "benched")


def test_times_stand_beside_the_dense_time_of_their_case(benched: Run) -> None:
    groups = by_setting(ffn_times(benched))
    assert [name.split(" rows")[0] for name in groups] == ["1,024", "64"]  # most cases first
    frame = groups["1,024 rows, float32, warm weights, made"]
    layers = frame[(frame["layer"] >= 0) & frame["sparse"]]
    assert layers["speedup"].tolist() == [5.0, 4.0, 2.0]
    assert layers["error_max"].tolist() == [2e-7] * 3
    assert set(frame["operation"]) == {"dense", "dense (gate and up fused)", "cpu kernel"}
    assert (frame["speedup"] * frame["us"] == 500.0).all()


def test_a_kernel_that_ran_in_parts_alone_is_its_parts_added_up(benched: Run) -> None:
    """As on recorded patterns of many rows; not where it ran whole too, nor one part without the other."""
    names = {"parts": ("gate", "up_down"), "both": ("gate", "up_down", "ffn_sparse"), "half": ("up_down",)}
    for layer, (case, ops) in enumerate(names.items()):
        sheet, more = Sheet(benched.path), {"input": "patterns", "rows": 4096}
        took = {"gate": 60.0, "up_down": 40.0, "ffn_sparse": 90.0}
        dense = {"ffn_dense": 500.0, "gate": 55.0, "up_down": 440.0}  # parts of dense are not another way of it
        rows = [row(case, layer, op, "torch", us, **more) for op, us in dense.items()]
        sheet.add(rows + [row(case, layer, op, "cpu", took[op], **more, repeats=3 + len(op)) for op in ops])
    frame = by_setting(ffn_times(open_run(benched.path)))["4,096 rows, float32, warm weights, made"]
    sparse = frame[frame["sparse"]].set_index("case")
    assert sparse["us"].to_dict() == {"parts": 100.0, "both": 90.0}
    summed_up = sparse.loc["parts"]
    assert summed_up[["speedup", "low", "high", "repeats"]].tolist() == [5.0, 90.0, 120.0, 7]
    assert summed_up["operation"] == "cpu kernel (gate product, then up and down)"
    assert sparse.loc["both", "operation"] == "cpu kernel"
    assert total_speedups(frame[frame["case"] == "half"], 3) == "Only dense was timed."


def test_the_break_even_lies_between_the_cases_on_either_side(benched: Run) -> None:
    frame = ffn_times(benched)
    sparse = frame[frame["sparse"] & (frame["rows"] == 1024) & (frame["input"] != "heavy")]
    assert break_even_nnz(sparse) == pytest.approx(100 + 100 * (500 - 400) / (700 - 400))
    assert break_even_nnz(sparse[sparse["nnz_mean"] <= 100]) is None


def test_the_page_shows_what_was_measured(show: Show, benched: Run) -> None:
    test = show(benched.path.parent, "kernels", run="benched")
    assert not test.exception
    test.selectbox(key="setting").set_value("1,024 rows, float32, warm weights, made").run()
    html = " ".join(str(element.proto.body) for element in test.get("html"))
    assert "cpu kernel 3.16\u202f×" in html  # 1500 µs over 475 µs
    assert "about 133 of 512" in html
    assert [chart.key for chart in test.get("plotly_chart")][:2] == ["bench-layers", "bench-nnz"]


def test_what_is_asked_of_twell_bench_is_what_it_takes(made_run: Run) -> None:
    """Every option is one of the command's, and cases are counted as it says them."""
    flags = {f"--{name.replace('_', '-')}" for name in BenchOptions.__dataclass_fields__} | {"--no-compile"}
    counts = {"layers": made_run.layers, "compressions": made_run.layers, "nnz": len(SHARES) + 1, "whole": 5}
    assert counts.keys() == KINDS.keys()
    for what, cases in counts.items():
        arguments, count = bench_arguments(made_run, ("model", None), what)
        assert count == cases
        assert {word for word in arguments if word.startswith("--")} <= flags


def stopped_after_a_layer(run: Path) -> int:
    """Stop the process that measures into a run once it has written a layer; return its id."""
    while not any(part.table == "bench" for part in open_run(run).manifest.parts):
        time.sleep(0.02)
    lines = {path.parent.name: path.read_bytes().split(b"\0") for path in Path("/proc").glob("[0-9]*/cmdline")}
    (number,) = (int(name) for name, words in lines.items() if b"bench" in words and str(run).encode() in words)
    os.kill(number, signal.SIGSTOP)
    return number


def test_a_measurement_begins_appears_as_it_goes_and_ends_well(bundled_run: Path, growing_page: Watched) -> None:
    page = growing_page.page
    growing_page.open("/kernels?run=tiny", ".js-plotly-plot")
    assert page.get_by_text("Measured side by side").count() == 0
    page.get_by_role("button", name="Measure now").click()
    page.get_by_role("button", name="Measure", exact=True).click()
    page.wait_for_selector(".st-key-job")
    process = stopped_after_a_layer(bundled_run)
    try:
        page.get_by_text("Measured side by side").wait_for(timeout=120_000)
        assert page.locator(".st-key-job").count() == 1, "the first layer stands there while others are being timed"
    finally:
        os.kill(process, signal.SIGCONT)
    page.wait_for_selector(".st-key-job", state="detached", timeout=180_000)
    growing_page.settle()
    assert page.locator('[data-testid="stAlert"]').count() == 0
    table = open_run(bundled_run).frame("bench")
    assert sorted(set(table["layer"])) == list(range(8))
    assert page.get_by_text("all 8 layers together").count() == 1
    growing_page.check()


def test_the_whole_model_is_measured_from_the_page(bundled_run: Path, growing_page: Watched) -> None:
    page = growing_page.page
    growing_page.open("/kernels?run=tiny", ".js-plotly-plot")
    page.get_by_role("button", name="Measure now").click()
    page.get_by_role("radio", name="The whole model").click()
    page.get_by_text("Times forward passes, generation and steps").wait_for()
    page.get_by_role("button", name="Measure", exact=True).click()
    page.wait_for_selector(".st-key-job")
    page.get_by_text("Whole model", exact=True).wait_for(timeout=120_000)
    page.wait_for_selector(".st-key-job", state="detached", timeout=180_000)
    growing_page.settle()
    assert page.locator('[data-testid="stAlert"]').count() == 0
    assert whole_model(open_run(bundled_run))["case"].nunique() == WHOLE_CASES
    growing_page.check()


def test_a_measurement_that_is_stopped_keeps_what_it_has(made: ModuleType, tmp_path: Path) -> None:
    run = open_run(made.bundled(tmp_path) / "tiny")
    runner, nnz = JobRunner(), ",".join(map(str, range(2, 42)))
    arguments = ["bench", "--shape", "64,128", "--inputs", "even", "--no-compile", "--out", str(run.path)]
    job = runner.start("a measurement", run.path, "tiny", [*arguments, "--nnz", nnz], cases=40)
    while not job.progress()[0] and job.running:
        time.sleep(0.1)
    job.stop()
    job.process.wait(60)
    assert job.process.returncode != -signal.SIGKILL
    assert job.failure() is None
    table = open_run(tmp_path / "tiny").frame("bench")
    assert 1 <= table["case"].nunique() < 40, "a case counts once it is timed, not when the last one is"


def test_the_fastest_safe_compression_of_a_layer_is_marked(show: Show, made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "settled", layers=5, d_ff=512, sequences=30, bench=True)
    truth = tile_settings(run).set_index(["layer", "compression"])
    frame = fastest_kernels(tile_settings(run))
    assert set(zip(frame["layer"], frame["compression"], strict=True)) == {(a, c) for a in (0, 3) for c in (4, 8, 16)}
    heat = time_map(frame).data[0]
    for layer, line in zip(heat.y, heat.text, strict=True):
        safe = {c: truth.loc[(layer, c), "microseconds"] for c in (4, 8, 16) if truth.loc[(layer, c), "safe"]}
        best = min(safe, key=safe.__getitem__) if safe else None
        for compression, cell in zip((4, 8, 16), line, strict=True):
            assert cell.startswith("✓") == (compression == best)
            assert ("(" in cell) == (compression not in safe)
            assert f"{truth.loc[(layer, compression), 'microseconds']:.0f}" in cell
    assert any(cell.startswith("✓") for line in heat.text for cell in line)
    assert any("(" in cell for line in heat.text for cell in line)
    test = show(tmp_path, "kernels", run="settled")
    assert not test.exception
    assert "settings" in {chart.key for chart in test.get("plotly_chart")}


def test_layers_without_a_time_are_counted_and_the_page_says_what_times_them(
    show: Show, made: ModuleType, tmp_path: Path
) -> None:
    html = {}
    for name, layers in (("whole", 5), ("brief", 2)):
        run = made.make(tmp_path / name, layers=5, d_ff=512, sequences=30)
        for part in run.parts("timings"):
            pq.write_table(pq.read_table(part, filters=[("layer", "<", layers)]), part)
        relisted(run, "timings")
        html[name] = "\n".join(str(element.proto.body) for element in show(tmp_path, "kernels", run=name).get("html"))
    assert "Only 2 of 5 layers were timed" in html["brief"] and "layers were timed" not in html["whole"]


def test_a_fast_setting_that_is_not_safe_is_passed_over() -> None:
    case = {"case": "layer 0", "layer": 0, "rows": 64, "dtype": "float32", "weights": "warm", "device": "made"}
    rows = [
        {**case, "compression": c, "kernel": kernel, "microseconds": us, "safe": safe, "fastest": False}
        for c, kernel, us, safe in (
            (4, "cpu", 60.0, True),
            (8, "cpu", 50.0, True),
            (16, "cpu", 40.0, False),
            (4, "reference", 10.0, True),
        )
    ]
    fastest = fastest_kernels(pd.DataFrame(rows))
    assert fastest.loc[fastest["fastest"], "compression"].tolist() == [8]
    assert set(fastest["kernel"]) == {"cpu"}


def test_one_compression_leaves_none_to_choose_and_the_page_says_how_to_time_more(show: Show, benched: Run) -> None:
    test = show(benched.path.parent, "kernels", run="benched")
    html = "\n".join(str(element.proto.body) for element in test.get("html"))
    assert "Only compression 8 has been timed" in html
    assert "--compression 4,8,16" in html


def test_a_kernel_is_named_with_its_compression_only_where_it_had_several(benched: Run) -> None:
    sheet = Sheet(benched.path)
    case = "layer 0 on text"
    sheet.add([row(case, 0, "ffn_sparse", "cuda", 90.0), row(case, 0, "ffn_sparse", "cuda", 80.0, compression=16)])
    names = set(ffn_times(open_run(benched.path))["operation"])
    assert {"cpu kernel", "cuda kernel, compression 8", "cuda kernel, compression 16"} <= names


PER_TOKEN = {"dense": 3.0, "sparse": 2.0}  # µs


def test_batches_of_different_size_are_compared_by_the_token(made_run: Run) -> None:
    frame = batch_times(made_run)
    frame["tokens"] = frame["tokens"].where(frame["batch"] < frame["batch"].max(), 17)
    frame["microseconds"] = np.where(frame["op"] == "ffn_dense", 3.0, 2.0) * frame["tokens"]
    dense, sparse = over_batches(summed(frame)).data
    assert len(dense.y) == frame["batch"].nunique() > 1
    np.testing.assert_allclose(dense.y, 3.0 * made_run.layers)
    np.testing.assert_allclose(sparse.y, 2.0 * made_run.layers)


def test_layers_timed_in_batches_of_their_own_are_added_up_by_turn() -> None:
    """Two layers whose turns are in batches 0 and 1, then 2 and 3, of which the last is larger, and one in batch 4."""
    batch, layer, tokens = [0, 1, 2, 3, 4], [0, 1, 0, 1, 0], [10, 10, 10, 20, 10]
    times = pd.DataFrame({"batch": batch, "layer": layer, "tokens": tokens})
    frame = pd.concat([times.assign(op=f"ffn_{op}", microseconds=us * times["tokens"]) for op, us in PER_TOKEN.items()])
    sums = summed(frame).sort_values(["op", "batch"])
    assert sums[["batch", "op", "tokens"]].to_numpy().tolist() == [
        [1, "dense", 10], [3, "dense", 20], [1, "sparse", 10], [3, "sparse", 20]
    ]  # fmt: skip
    np.testing.assert_allclose(sums["microseconds"], [60, 120, 40, 80])
    assert summed(frame, 0).query("op == 'dense'")["batch"].tolist() == [0, 2, 4]


def test_layers_together_name_an_operation_that_was_timed_on_fewer() -> None:
    rows = [("dense", 0, 8.0, 1.0), ("dense", 1, 8.0, 1.0), ("cpu kernel", 0, 4.0, 2.0), ("cpu kernel", 1, 2.0, 4.0)]
    frame = pd.DataFrame([*rows, ("gate", 1, 5.0, 1.6)], columns=["operation", "layer", "us", "speedup"])
    sentence = total_speedups(frame.assign(rows=1024), 3)
    assert sentence.startswith(
        "Speedup over dense in twell bench, 2 of 3 layers (L0, L1) together at 1\u202f024 rows a call: "
    )
    assert "cpu kernel 2.67" in sentence
    assert "gate 1.60" in sentence
    assert sentence.endswith("(over the 1 layer where it was timed).")
