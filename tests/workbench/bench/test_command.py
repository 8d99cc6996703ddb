"""`twell bench`: its figures are those of the layers as they run, and its file is whole at any moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.benches import quick, save_patterns
from transformers import AutoModelForCausalLM

from twell.kernels.benchmark.operations import DENSE, GATE, UP_DOWN, Operation
from twell.kernels.benchmark.runner import FiringCounts, Result
from twell.workbench.bench import command as benches
from twell.workbench.bench.cases import Case
from twell.workbench.bench.command import bench
from twell.workbench.bench.layer_inputs import layer_inputs, text_ids, uniform_ids
from twell.workbench.bench.table import rows_of, work
from twell.workbench.errors import UserError
from twell.workbench.models.load import load
from twell.workbench.run import parquet_part
from twell.workbench.run.store import open_run
from twell.workbench.run.summary_only import copy_without_activity
from twell.workbench.run.writer import RunWriter, arrow_schema

UNITS = {
    "microseconds": "µs",
    "tflops": "TFLOP/s",
    "gigabytes_per_second": "GB/s",
    "ceiling_share": "share",
    "error_mean": "relative",
    "error_max": "relative",
    "rows_past_slots": "rows",
}


def value_of(rows: list[dict[str, Any]], metric: str, op: str, case: str | None = None) -> float:
    cells = [row["value"] for row in rows if (row["metric"], row["op"]) == (metric, op) and case in (None, row["case"])]
    assert len(cells) == 1
    return cells[0]


def test_a_models_layers(tiny: Path, texts: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "figures.parquet"
    rows = bench(quick(model=str(tiny), text=texts, rows="7,60", layers="0,2", out=out, compression="8,16"))
    assert pq.read_schema(out).equals(arrow_schema("bench", 3, 264))
    assert pq.read_table(out).to_pylist() == [{name: row[name] for name in pq.read_schema(out).names} for row in rows]
    inputs = {"text": "on text", "uniform": "on uniform ids"}
    names = [f"layer {n} {where}, {r} rows" for where in inputs.values() for r in (7, 60) for n in (0, 2)]
    assert list(dict.fromkeys(row["case"] for row in rows)) == names
    assert {(row["metric"], row["unit"]) for row in rows} == set(UNITS.items())
    for row in rows:
        assert row["case"] == f"layer {row['layer']} {inputs[row['input']]}, {row['rows']} rows"
        assert (row["d_model"], row["d_ff"], row["dtype"], row["ffn"]) == (32, 264, "float32", "gated")
        assert (row["weights"], row["graph"]) == ("warm", False) and 5 <= row["repeats"] <= 30
        assert (row["kernel"] == "torch") == (row["compression"] == 0) == (row["tile"] == 0)
        assert row["op"] in ("ffn_dense", "ffn_fused", "gate", "ffn_sparse") and row["device"] and row["commit"]
        assert 0 < row["nnz_mean"] < 264
        if row["metric"] == "microseconds":
            assert 0 < row["low"] <= row["value"] <= row["high"]
        else:
            assert row["low"] is row["high"] is None and row["value"] >= 0
        if row["metric"].startswith("error"):
            assert row["value"] < 1e-4


def test_layers_get_what_they_get_alone_and_without_padding(tiny: Path, texts: tuple[str, ...]) -> None:
    loaded = load(str(tiny), device="cpu")
    pieces = text_ids(loaded, texts, 150)
    assert sum(map(len, pieces)) == 150
    inputs = layer_inputs(loaded, pieces, {0, 2})
    plain = AutoModelForCausalLM.from_pretrained(tiny).eval()
    for layer in (0, 2):
        heard: list[torch.Tensor] = []
        mlp = plain.get_decoder().layers[layer].mlp
        with torch.inference_mode():
            hook = mlp.register_forward_pre_hook(lambda _, given, heard=heard: heard.append(given[0][0]))
            for piece in pieces:
                plain(torch.from_numpy(piece[None].astype(np.int64)))
            hook.remove()
        torch.testing.assert_close(inputs[layer], torch.cat(heard), rtol=1e-4, atol=1e-5)


def test_uniform_ids_keep_the_lengths_and_leave_special_ids_out(tiny: Path, texts: tuple[str, ...]) -> None:
    loaded = load(str(tiny), device="cpu")
    pieces = text_ids(loaded, texts, 10_000) * 20
    drawn = uniform_ids(loaded, pieces)
    assert [len(piece) for piece in drawn] == [len(piece) for piece in pieces]
    counts = np.bincount(np.concatenate(drawn), minlength=len(loaded.tokenizer))
    special = loaded.tokenizer.all_special_ids
    assert counts[special].sum() == 0
    assert (np.delete(counts, special) > 0).all()


@pytest.fixture
def run_folder(tmp_path: Path, make_manifest: Callable[..., Any], make_activity: Callable[..., Any]) -> Path:
    run = RunWriter(tmp_path / "run", make_manifest())
    run.add("activity", make_activity(2, 5))
    run.finish()
    return tmp_path / "run"


def test_a_bench_in_a_run_is_one_of_its_tables(run_folder: Path, tmp_path: Path) -> None:
    bench(quick(out=run_folder))
    bench(quick(out=run_folder, rows="30"))  # another case is added
    again = bench(quick(out=run_folder))  # the same is replaced
    run = open_run(run_folder)
    assert run.has("bench") and run.damaged() == []
    frame = run.frame("bench")
    assert set(frame["case"]) == {"even nnz 9, 20 rows", "even nnz 9, 30 rows"}
    took = frame[(frame["rows"] == 20) & (frame["metric"] == "microseconds")].set_index("op")["value"]
    assert took["ffn_sparse"] == value_of(again, "microseconds", "ffn_sparse")
    assert len(took) == 4
    copy_without_activity(run_folder, tmp_path / "copy")
    copy = open_run(tmp_path / "copy")
    assert copy.damaged() == [] and copy.arrow("bench").equals(run.arrow("bench"))


def test_what_was_written_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second case that cannot be written, or that fails, leaves the first."""
    out = tmp_path / "figures.parquet"
    first = bench(quick(out=out))
    monkeypatch.setattr(parquet_part.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(UserError, match="the disk is full"):
        bench(quick(out=out, rows="30"))
    monkeypatch.undo()
    assert pq.read_table(out).num_rows == len(first)
    seen: list[str] = []
    real = benches.bench_case

    def second_fails(*given: Any) -> Result:
        seen.append("case")
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(benches, "bench_case", second_fails)
    with pytest.raises(KeyboardInterrupt):
        bench(quick(out=out, rows="40,50"))
    assert set(pq.read_table(out)["rows"].to_pylist()) == {20, 40}


def test_recorded_patterns_run_the_whole_ffn_where_rows_are_few(tmp_path: Path) -> None:
    nnz = save_patterns(tmp_path / "made_d64_f128.npz")
    rows = bench(quick(patterns=tmp_path / "made_d64_f128.npz", rows="20,100"))
    few, many = (f"recorded layer 3, {n} rows" for n in (20, 100))
    assert value_of(rows, "error_max", "ffn_sparse", few) < 1e-5
    assert {row["op"] for row in rows if row["case"] == many} == {"ffn_dense", "gate", "up_down"}
    means = {row["case"]: row["nnz_mean"] for row in rows}
    assert means[few] == nnz[-20:].mean()
    assert means[many] == np.tile(nnz, 3)[-100:].mean()


def test_energy_is_power_times_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Planted:
        reads = True

        def __init__(self, _: torch.device) -> None: ...

        def window(self, run: Callable[[], Any]) -> tuple[float, float]:
            run()
            return 1980.0, 500.0

    monkeypatch.setattr(benches, "Gauge", Planted)
    rows = bench(quick(energy=True))
    assert {row["op"] for row in rows if row["metric"] == "watts"} == {"ffn_dense", "ffn_sparse"}
    for op in ("ffn_dense", "ffn_sparse"):
        millijoules = 500 * value_of(rows, "microseconds", op) / 1e3 / 20
        assert value_of(rows, "millijoules_per_token", op) == pytest.approx(millijoules)
    assert value_of(rows, "sm_mhz", "ffn_sparse") == 1980


def test_rates_are_what_has_to_be_done_over_time() -> None:
    ours = Operation("ffn_sparse", "cpu", 8)
    took = {DENSE: [3000.0], GATE: [1000.0], ours: [1500.0, 2000.0, 4000.0], UP_DOWN: [2000.0]}
    result = Result(took, {}, FiringCounts(10.0, 50, {8: 3}), set(), {})
    about = {"d_model": 64, "d_ff": 128, "dtype": "bfloat16", "ffn": "gated", "device": "here", "commit": "now"}
    assert work(20, result, DENSE, about) == (20 * 64 * 128 * 6, 2 * (3 * 64 * 128 + 2 * 20 * 64))
    assert work(20, result, GATE, about) == (20 * 64 * 128 * 2, 2 * (64 * 128 + 20 * (64 + 128)))
    assert work(20, result, ours, about) == (2 * 20 * 64 * (128 + 20), 2 * (64 * (128 + 100) + 2 * 20 * 64))
    packing = Operation(GATE.op, "cpu", 8)  # gives a word for each that fired
    assert work(20, result, packing, about) == (20 * 64 * 128 * 2, 2 * (64 * 128 + 20 * (64 + 2 * 10)))
    plain = work(20, result, ours, {**about, "ffn": "plain", "dtype": "float32"})
    assert plain == (2 * 20 * 64 * (128 + 10), 4 * (64 * (128 + 50) + 2 * 20 * 64))
    case = Case("made", "even", -1, 20, False, lambda: None)  # type: ignore[arg-type, return-value]
    rows = [row for row in rows_of(case, result, about, {}) if row["op"] == "ffn_sparse"]
    assert value_of(rows, "microseconds", "ffn_sparse") == 2000
    assert value_of(rows, "tflops", "ffn_sparse") == pytest.approx(2 * 20 * 64 * 148 / 2e-3 / 1e12)
    assert value_of(rows, "ceiling_share", "ffn_sparse") == 0.5
    assert value_of(rows, "rows_past_slots", "ffn_sparse") == 3


def test_the_page_says_each_thing_once(capsys: pytest.CaptureFixture[str]) -> None:
    bench(quick(nnz="9,20", kernel=("hopper", "cuda", "cpu", "reference"), plain=True))
    printed = capsys.readouterr().out
    assert printed.count("without hopper, cuda: expected device cuda, got cpu") == 1
    assert printed.count("plain, even nnz") == 4  # in the lines that come first, and over each case
    assert "synthetic inputs, 64 × 128, float32" in printed and "µs" not in printed
    lines = [line.split() for line in printed.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["dense"]] == ["1.00", "1.00"]
    assert [line[0] for line in lines if line and line[0] in ("cpu", "reference")] == ["cpu", "reference"] * 2


def test_layers_are_added_up(tiny: Path, texts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    rows = bench(quick(model=str(tiny), text=texts, rows="50", inputs="text"))
    took = {
        op: sum(row["value"] for row in rows if (row["metric"], row["op"]) == ("microseconds", op))
        for op in ("ffn_dense", "ffn_sparse")
    }
    ratio = took["ffn_dense"] / took["ffn_sparse"]
    assert "3 layers on text, 50 rows: dense (gate and up fused) " in capsys.readouterr().out or ratio < 0
    bench(quick())
    assert "layers" not in capsys.readouterr().out
