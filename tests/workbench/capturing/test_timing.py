"""What is timed when: every sparse call, dense ones within their share, captures that end or go on. Cost: 20 s."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.captures import run_capture, save_model
from support.clock import Clock

from twell.kernels.modules import SparseFFN
from twell.workbench.capturing.forward import Inputs, forward
from twell.workbench.capturing.recorder import Recorder
from twell.workbench.capturing.timing import calibration
from twell.workbench.capturing.timing.calibration import WARM
from twell.workbench.capturing.timing.timings import Timings
from twell.workbench.errors import UserError
from twell.workbench.models.load import LoadedModel, load
from twell.workbench.options import CaptureOptions
from twell.workbench.power import Gauge
from twell.workbench.run import writer
from twell.workbench.run.part_files import LIVE, live_timings
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.writer import RunWriter
from twell.workbench.text.batches import Batch, batches
from twell.workbench.text.sequences import documents, sequences

SHARE = CaptureOptions.timings_share  # unless asked for otherwise


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> LoadedModel:
    return load(str(tiny), device="cpu")


@pytest.fixture(scope="module")
def batch(loaded: LoadedModel, texts: tuple[str, ...]) -> Batch:
    return next(batches(sequences(documents(texts), loaded.tokenizer, 24), 64, []))


def passes(timed: Timings, batch: Batch, many: int) -> None:
    """Pass over the same batch many times, and read its marks."""
    for number in range(many):
        numbered = Batch(number, batch.numbers, batch.sequences, batch.special)
        with timed.of(numbered) as times:
            counted = forward(timed.loaded, Inputs.of(numbered, timed.loaded.device), probes="counts", times=times)
        counted.wait()
        if times is not None:
            timed.record(numbered, times)


def test_each_call_has_its_own_time_and_nnz(
    loaded: LoadedModel, batch: Batch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock passes in the layers' own calls alone: 1 s in layer 0, 2 s in layer 1, 3 s in layer 2; dense 10 s."""
    run_sparse, run_dense = SparseFFN.forward, SparseFFN.dense

    def sparse(self: SparseFFN, x: torch.Tensor) -> torch.Tensor:
        before = self.probe.before
        if before is not None:
            self.probe.before = lambda layer: (before(layer), setattr(clock, "now", clock.now + 1 + layer))[0]
        try:
            return run_sparse(self, x)
        finally:
            self.probe.before = before

    def dense(self: SparseFFN, x: torch.Tensor) -> torch.Tensor:
        clock.now += 10
        return run_dense(self, x)

    monkeypatch.setattr(SparseFFN, "forward", sparse)
    monkeypatch.setattr(SparseFFN, "dense", dense)
    timed = Timings(loaded, 1, SHARE, True)
    nnz: dict[int, float] = {}
    forward(
        loaded, Inputs.of(batch, loaded.device), probes="counts",
        on_layer=lambda layer, _x, stats: nnz.update({layer: float(stats.nnz.double().mean())}),
    )  # fmt: skip
    passes(timed, batch, 3)
    rows = pd.DataFrame(timed.rows)
    ours = rows[rows["op"] == "ffn_sparse"].set_index(["batch", "layer"])
    assert ours.index.tolist() == [(number, layer) for number in range(3) for layer in range(3)]
    np.testing.assert_allclose(ours["microseconds"], np.tile([1e6, 2e6, 3e6], 3))
    np.testing.assert_allclose(ours["nnz_mean"], np.tile([nnz[layer] for layer in range(3)], 3))
    assert set(ours["tokens"]) == {batch.padded}
    whole = rows[rows["op"] == "pass"]
    np.testing.assert_allclose(whole["microseconds"], 6e6), "what ran beside the pass is not in it"
    assert set(whole["tokens"]) == {int(batch.lengths.sum())}
    assert whole["seconds"].is_monotonic_increasing
    calibrated = rows[rows["op"] == "ffn_dense"]
    assert set(calibrated["batch"]) == {WARM} and calibrated["layer"].tolist() == [0, 1, 2]
    np.testing.assert_allclose(calibrated["microseconds"], 1e7)
    assert set(rows[rows["op"] == "model_dense"]["microseconds"]) == {3e7}
    assert timed.spent == pytest.approx(3 * 10 + 10 + 2 * 30), "one dense run more where the shape is new"


def test_a_clock_that_goes_back_makes_no_row(loaded: LoadedModel, batch: Batch, clock: Clock) -> None:
    timed = Timings(loaded, 1, SHARE, True)
    with timed.of(batch) as times:
        counted = forward(loaded, Inputs.of(batch, loaded.device), probes="counts", times=times)
        clock.now -= 5
        assert times is not None
        times.open("ffn_dense")
        clock.now -= 5
        times.close("ffn_dense", 0, 8)
    counted.wait()
    timed.record(batch, times)
    assert "ffn_dense" not in {row["op"] for row in timed.rows}
    assert all(row["microseconds"] >= 0 for row in timed.rows)


@pytest.mark.parametrize(("share", "windows"), [(0.0, 0), (1.0, 2)])
def test_power_is_measured_where_it_can_be_afforded(
    share: float, windows: int, loaded: LoadedModel, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(Gauge, "reads", True)
    monkeypatch.setattr(Gauge, "read", lambda _self: (1000.0, 100.0))
    monkeypatch.setattr(Gauge, "window", lambda _self, operation: ran.append(operation) or (1000.0, 300.0))
    monkeypatch.setitem(calibration.ALLOWANCE, "cpu", 0.0)
    timed = Timings(loaded, 1, share, True)
    passes(timed, batch, 2)
    rows = pd.DataFrame(timed.rows)
    whole = rows[rows["op"].isin(["model_dense", "model_sparse"])]
    assert len(ran) == windows and len(whole) == 2
    assert whole["watts"].dropna().tolist() == [300.0] * windows, "the power of a moment says nothing of one operation"
    assert (rows.loc[rows["op"] == "ffn_sparse", "watts"] == 100.0).all()


def ops(run: Run) -> set[tuple[int, str]]:
    rows = run.frame("timings")
    return {*zip(rows["layer"], rows["op"], strict=True)}


LAYER_OPS = ("attention", "ffn_dense", "ffn_sparse", "gate")
EVERY = {(layer, op) for layer in range(3) for op in LAYER_OPS} | {
    (-1, op) for op in ("pass", "model_dense", "model_sparse")
}


@pytest.mark.parametrize("tokens", [2, 40, 5000])
def test_captures_of_two_tokens_and_of_one_batch(
    tokens: int, tiny: Path, tmp_path: Path, texts: tuple[str, ...]
) -> None:
    """A capture that ends before its device was warm runs its last batch once more, which changes no count."""
    given = {"tokens": tokens, "timings": 1, "batch_tokens": 8192, "probes": "all"}
    timed = run_capture(tiny, tmp_path / "timed", texts, **given)
    silent = run_capture(tiny, tmp_path / "silent", texts, **given | {"timings": 0})
    assert ops(timed) == EVERY
    frame = timed.frame("timings")
    assert not frame.duplicated(["batch", "layer", "op", "phase"]).any()
    for table in ("activity", "neurons", "unions"):
        if silent.has(table):
            assert timed.arrow(table).equals(silent.arrow(table)), table


def test_a_capture_of_one_layer_and_of_one_token(tmp_path: Path, texts: tuple[str, ...]) -> None:
    """Every call is timed, though the only token is the first of its sequence and in no sum."""
    model = save_model(tmp_path / "model", num_hidden_layers=1)
    with pytest.raises(UserError, match="holds no unflagged token"):
        run_capture(model, tmp_path / "one", texts, tokens=1, timings=1)
    run = open_run(tmp_path / "one")
    assert ops(run) == {each for each in EVERY if each[0] < 1}
    assert run.frame("timings")["tokens"].eq(1).all()


def test_generation_is_timed_by_phase(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    run = run_capture(tiny, tmp_path / "made", texts, timings=1, generate=4, probes="counts", batch_tokens=128)
    frame = run.frame("timings")
    calls = frame[frame["op"] == "ffn_sparse"]
    assert set(calls["phase"]) == {0, 1}
    dense = frame[frame["op"] == "ffn_dense"]
    assert {*zip(dense["layer"], dense["phase"], strict=True)} == {(layer, at) for layer in range(3) for at in (0, 1)}
    assert calls.groupby(["batch", "phase"])["layer"].nunique().eq(3).all()


def test_all_layers_of_the_demo(demo: Path) -> None:
    """Every layer, each operation, and the whole model; every sparse call of every batch."""
    frame = open_run(demo).frame("timings")
    layers = frame[frame["layer"] >= 0]
    assert {*zip(layers["layer"], layers["op"], strict=True)} == {(layer, op) for layer in range(8) for op in LAYER_OPS}
    assert {"model_dense", "model_sparse", "pass"} == {*frame.loc[frame["layer"] < 0, "op"]}
    often = layers[layers["op"] == "ffn_sparse"].groupby("layer")["batch"].nunique()
    assert set(often) == {frame["batch"].nunique()}
    assert layers.loc[layers["op"] == "ffn_dense", "batch"].min() < 10
    assert not layers.duplicated(["layer", "op", "batch"]).any()


def test_timings_change_no_count(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    silent = run_capture(tiny, tmp_path / "silent", texts)
    timed = run_capture(tiny, tmp_path / "timed", texts, timings=1, timings_share=1.0)
    assert not silent.has("timings")
    for table in ("activity", "neurons", "sequences", "vocab"):
        assert timed.arrow(table).equals(silent.arrow(table)), table
    frame = timed.frame("timings")
    first = frame[frame["batch"] == 0]
    assert ops(timed) == EVERY
    assert (frame["microseconds"] > 0).all()
    assert set(frame["kernel"]) == {"dense", timed.manifest.kernel["name"]}
    rows = silent.activity()
    mean = rows[rows["sequence"].isin(range(2))]["nnz_01"].mean()  # of the batch's real rows: near, padding aside
    assert first.set_index(["layer", "op"]).loc[(1, "ffn_sparse"), "nnz_mean"] == pytest.approx(mean, rel=0.3)


def test_readers_see_the_rows_of_the_open_part(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the parts while a capture runs, from its first batch on, and gone when it has ended; what a killed one
    leaves is no error."""
    seen: list[pd.DataFrame] = []
    ran, shown_after = [0], []  # batches that ran, and how many had when rows were shown
    write, show, run_batch = RunWriter._write_live, RunWriter.show_timings, Recorder._run

    def noted(self: RunWriter, columns: Any) -> None:
        shown_after.append((ran[0], set(columns["batch"])))
        show(self, columns)

    def counted(self: Recorder, *given: Any, **named: Any) -> Any:
        ran[0] += 1
        return run_batch(self, *given, **named)

    def watched(self: RunWriter, rows: Any) -> None:
        write(self, rows)
        live = live_timings(self.folder)
        assert live is not None
        seen.append(live.to_pandas())

    monkeypatch.setattr(RunWriter, "_write_live", watched)
    monkeypatch.setattr(RunWriter, "show_timings", noted)
    monkeypatch.setattr(Recorder, "_run", counted)
    monkeypatch.setattr(writer, "LIVE_SECONDS", 0.0)
    run = run_capture(tiny, tmp_path / "run", texts, timings=1)
    assert seen and live_timings(run.path) is None
    assert shown_after[0] == (1, {0}), "nobody waits for the second batch"
    assert all(after == len(numbers) for after, numbers in shown_after)
    assert not list(run.path.glob("live*"))
    rows = run.frame("timings")
    pd.testing.assert_frame_equal(seen[-1], rows[: len(seen[-1])], check_dtype=False)
    (run.path / LIVE).write_bytes(b"PAR1 cut short")
    assert live_timings(run.path) is None
