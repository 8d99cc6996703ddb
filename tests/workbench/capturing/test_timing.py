"""What is timed when: the budget over captures of any length, and runs that end early or go on. Cost: 20 s."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from twell.workbench.capturing import timing, timing_schedule
from twell.workbench.capturing.command import capture
from twell.workbench.capturing.forward import Inputs, forward
from twell.workbench.capturing.timing import Timings
from twell.workbench.models.load import LoadedModel, load
from twell.workbench.options import CaptureOptions
from twell.workbench.power import Gauge
from twell.workbench.run.store import open_run
from twell.workbench.text.batches import Batch, batches
from twell.workbench.text.sequences import documents, sequences

# Of one H200 and 131,072 rows of a model of 2048 x 5632, in seconds
BATCH = 0.265
LAYER = ("attention", "ffn_dense", "ffn_sparse", "gate")  # of these the attention takes nothing beside the pass
TAKES = {"ffn_dense": 0.0142, "ffn_sparse": 0.0068, "gate": 0.0052}
LAYER_TAKES = sum(TAKES.values())
TAKES |= {"model_dense": 0.318, "model_sparse": 0.261}

SHARE = CaptureOptions.timings_share  # unless asked for otherwise


class Clock:
    """Time that passes only as told: a batch takes BATCH, an operation what TAKES says."""

    def __init__(self) -> None:
        self.now, self.ran = 0.0, Counter[str]()

    def turns(self, operations: Mapping[str, Any], *_: Any, warm_up: bool, **__: Any) -> dict[str, list[float]]:
        for name, operation in operations.items():
            operation()
            self.ran[name] += 1 + warm_up
            self.now += TAKES[name] * (1 + warm_up)
        return {name: [TAKES[name] * 1e6] for name in operations}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (timing, timing_schedule):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: made.now))
    monkeypatch.setattr(timing, "time_in_turns", made.turns)
    monkeypatch.setitem(timing.ALLOWANCE, "cpu", timing.ALLOWANCE["cuda"])
    return made


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> LoadedModel:
    return load(str(tiny), device="cpu")


@pytest.fixture(scope="module")
def batch(loaded: LoadedModel, texts: tuple[str, ...]) -> Batch:
    return next(batches(sequences(documents(texts), loaded.tokenizer, 24), 64, []))


def passes(timings: Timings, batch: Batch, clock: Clock, many: int) -> Iterator[int]:
    """Passes over the same batch; its number, each time one is through."""
    for number in range(many):
        numbered = Batch(number, batch.numbers, batch.sequences, batch.special)
        with timings.of(numbered) as hear:
            clock.now += BATCH
            forward(timings.loaded, Inputs.of(numbered, timings.loaded.device), probes="counts", on_layer=hear)
        yield number


def pieces(timings: Timings) -> list[tuple[int, int]]:
    """(batch, layer) of each piece, in the order they were timed."""
    return list(dict.fromkeys((row["batch"], row["layer"]) for row in timings.rows))


@pytest.mark.parametrize("share", [0.02, 0.1])
def test_no_more_than_its_share_at_any_moment(share: float, loaded: LoadedModel, batch: Batch, clock: Clock) -> None:
    timings = Timings(loaded, 1, share, True)
    for number in passes(timings, batch, clock, 300):
        assert timings.spent <= timing.ALLOWANCE["cuda"] + share * clock.now
        assert clock.now - BATCH * (number + 1) == pytest.approx(timings.spent)  # all that it took is in the books
    saved = timing_schedule.PASSES * BATCH  # at most: for the whole model
    assert timings.spent + saved > timing.ALLOWANCE["cuda"] + share * clock.now  # and what it may spend it does
    often = Counter(layer for _, layer in pieces(timings))
    assert often[0] == pytest.approx(often[1], abs=1) == pytest.approx(often[2], abs=1)
    assert often[-1] == pytest.approx(often[0] / timing_schedule.MODEL_EVERY, abs=1)
    order = [layer for _, layer in pieces(timings)]
    assert order[:8] == [0, 1, 2, -1, 0, 1, 2, 0]


def test_a_capture_of_25_s_times_five_layers(
    loaded: LoadedModel, batch: Batch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rounds of three layers, without the whole model: each operation runs once, and the first time twice."""
    monkeypatch.setattr(timing_schedule, "MODEL_EVERY", 10**6)
    timings = Timings(loaded, 1, SHARE, True)
    timings.schedule._round = 1
    assert len([*passes(timings, batch, clock, 94)]) == 94
    assert 24.9 < BATCH * 94 < 25
    assert len(pieces(timings)) >= 5
    assert clock.ran["ffn_dense"] == len(pieces(timings)) + 1
    assert timings.spent < 0.0075 * BATCH * 94


def test_a_capture_of_four_minutes_times_the_whole_set(loaded: LoadedModel, batch: Batch, clock: Clock) -> None:
    """As many pieces as eight layers are, and the whole model."""
    timings = Timings(loaded, 1, SHARE, True)
    assert len([*passes(timings, batch, clock, round(240 / BATCH))]) > 900
    often = Counter(layer for _, layer in pieces(timings))
    assert often[-1] == 1 and often.total() > 8
    assert timings.spent < 0.0055 * clock.now


@pytest.mark.parametrize("long", [0.0, 1.0])
def test_attention_is_timed_where_it_runs(
    long: float, loaded: LoadedModel, batch: Batch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a pass, but for the first time that it is timed, whether turns are short or not; of all rows, where the FFN
    is timed on fewer."""
    monkeypatch.setattr(timing_schedule, "SHORT", long)
    ran: list[int] = []
    for number, block in enumerate(loaded.blocks):
        attend = block.self_attn.forward

        def counted(*args: Any, _number: int = number, _attend: Any = attend, **given: Any) -> Any:
            ran.append(_number)
            return _attend(*args, **given)

        monkeypatch.setattr(block.self_attn, "forward", counted)
    monkeypatch.setitem(timing.ROWS, "cpu", 8)
    timings = Timings(loaded, 2, 1.0, True)
    assert [*passes(timings, batch, clock, 3)] == [0, 1, 2]
    layers = [row for row in timings.rows if row["layer"] >= 0]
    assert {(row["layer"], row["op"], row["batch"]) for row in layers} == {
        (layer, op, number) for layer in range(3) for op in LAYER for number in (0, 2)
    }
    assert {(row["op"], row["tokens"]) for row in layers} == {
        (op, batch.padded if op == "attention" else 8) for op in LAYER
    }
    assert all(row["microseconds"] > 0 for row in layers)
    whole = 2  # passes of its turn, dense and sparse
    assert Counter(ran) == {0: 3 + 1 + whole, 1: 3 + whole, 2: 3 + whole}


def test_every_layer_and_the_whole_model_in_every_batch_with_a_share_of_one(
    loaded: LoadedModel, batch: Batch, clock: Clock
) -> None:
    timings = Timings(loaded, 2, 1.0, True)
    assert [*passes(timings, batch, clock, 6)] == [*range(6)]
    layers = [(number, layer) for number in (0, 2, 4) for layer in range(3)]
    assert sorted(pieces(timings)) == sorted([*layers, (0, -1), (4, -1)])


def test_a_short_turn_is_warmed_up_each_time(
    loaded: LoadedModel, batch: Batch, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing_schedule, "SHORT", 1.0)
    timings = Timings(loaded, 1, 0.05, True)
    assert len([*passes(timings, batch, clock, 200)]) == 200
    assert clock.ran["ffn_dense"] == 2 * sum(row["op"] == "ffn_dense" for row in timings.rows) > 8
    assert timings.spent <= timing.ALLOWANCE["cuda"] + 0.05 * clock.now


@pytest.mark.parametrize(("last", "order"), [(0, [1, 2, -1, 0]), (2, [-1, 0, 1, 2]), (-1, [0, 1, 2, 0])])
def test_a_run_that_goes_on_goes_on_with_the_next(
    last: int, order: list[int], loaded: LoadedModel, batch: Batch, clock: Clock
) -> None:
    timings = Timings(loaded, 1, 0.05, True, last=last)
    for _number in passes(timings, batch, clock, 150):
        # of the first layer nothing is known, and its first turn is not timed; ALLOWANCE it has had
        assert timings.spent <= 0.05 * clock.now + 2 * LAYER_TAKES
    assert [layer for _, layer in pieces(timings)][:4] == order


@pytest.mark.parametrize(("share", "many", "asked"), [(1.0, 40, 2), (0.5, 40, 0), (0.5, 250, 2)])
def test_power_is_asked_for_once_and_only_when_it_can_be_afforded(
    share: float,
    many: int,
    asked: int,
    loaded: LoadedModel,
    batch: Batch,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    windows = []

    def window(_self: Gauge, operation: Any) -> tuple[float, float]:
        windows.append(operation)
        clock.now += 6
        return 1000.0, 300.0

    monkeypatch.setattr(Gauge, "reads", True)
    monkeypatch.setattr(Gauge, "read", lambda _self: (1000.0, 100.0))
    monkeypatch.setattr(Gauge, "window", window)
    timings = Timings(loaded, 1, share, True)
    for _number in passes(timings, batch, clock, many):
        assert share == 1 or timings.spent <= timing.ALLOWANCE["cuda"] + share * clock.now
    assert len(windows) == asked
    whole = [row for row in timings.rows if row["layer"] == -1]
    assert len(whole) > 2 and sum(row["watts"] is not None for row in whole) == asked
    assert all(row["watts"] == 100.0 for row in timings.rows if row["layer"] >= 0)


def test_all_layers_of_the_demo(demo: Path) -> None:
    """Every layer, each operation on as many rows, and the whole model."""
    frame = open_run(demo).frame("timings")
    layers = frame[frame["layer"] >= 0]
    assert {*zip(layers["layer"], layers["op"], strict=True)} == {(layer, op) for layer in range(8) for op in LAYER}
    assert {"model_dense", "model_sparse"} == {*frame.loc[frame["layer"] < 0, "op"]}
    often = layers[layers["op"] == "ffn_sparse"].groupby("layer")["batch"].nunique()
    assert often.max() - often.min() <= 1
    assert not layers.duplicated(["layer", "op", "batch"]).any()


KILLED = """
import os, signal, sys
from pathlib import Path
from twell.workbench.capturing import timing, timing_schedule
from twell.workbench.run import writer
from twell.workbench.capturing.command import capture
from twell.workbench.options import CaptureOptions
writer.PART_TOKENS = 1000
take, run = timing.Timings._take, Path(sys.argv[3])
def dying(self, operations, untimed):
    if "gate" in operations and len([*run.glob("timings/*.parquet")]) > 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return take(self, operations, untimed)
timing.Timings._take = dying
capture(CaptureOptions(model=sys.argv[1], text=(sys.argv[2],), out=run, batch_tokens=256, seq_len=64, device="cpu",
                       kernel="reference", timings_share=0.2))
"""


def test_killed_in_the_middle_of_a_timing(tiny: Path, tmp_path: Path) -> None:
    """Parts are readable and go together; the run goes on, in its text as if nothing had been, in its timings with the
    next layer."""
    text = tmp_path / "long.txt"
    text.write_text("Where the river bends, the ferry waits for nobody. " * 200, encoding="utf-8")
    command = [sys.executable, "-c", KILLED, str(tiny), str(text), str(tmp_path / "run")]
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == -9
    cut = open_run(tmp_path / "run")
    assert cut.damaged() == []
    before = cut.frame("timings")
    assert len(before) and cut.manifest.tokens == len(cut.activity()) > 0
    options = CaptureOptions(
        model=str(tiny), text=(str(text),), out=cut.path, batch_tokens=256, seq_len=64, device="cpu",
        kernel="reference", timings_share=0.2, resume=True,
    )  # fmt: skip
    ended = capture(options)
    whole = capture(replace(options, out=tmp_path / "whole", timings=0))
    assert ended.arrow("activity").combine_chunks().equals(whole.arrow("activity").combine_chunks())
    after = ended.frame("timings")
    pd.testing.assert_frame_equal(after[: len(before)], before)
    more = after[len(before) :]
    assert more["batch"].min() > before["batch"].max()
    assert more["layer"].iloc[0] in ((before["layer"].iloc[-1] + 1) % 3, -1)


def test_timings_change_no_count(
    run_capture: Callable[..., Any], tiny: Path, tmp_path: Path, texts: tuple[str, ...]
) -> None:
    silent = run_capture(tiny, tmp_path / "silent", texts)
    timed = run_capture(tiny, tmp_path / "timed", texts, timings=1, timings_share=1.0)
    assert not silent.has("timings")
    for table in ("activity", "neurons", "sequences", "vocab"):
        assert timed.arrow(table).equals(silent.arrow(table)), table
    frame = timed.frame("timings")
    first = frame[frame["batch"] == 0]
    ops = ("ffn_dense", "ffn_sparse", "gate", "attention")
    pairs = {(layer, op) for layer in range(3) for op in ops}
    assert set(zip(first["layer"], first["op"], strict=True)) == pairs | {(-1, "model_dense"), (-1, "model_sparse")}
    assert (frame["microseconds"] > 0).all()
    assert len(first) == len(pairs) + 2
    assert set(frame["kernel"]) == {"dense", timed.manifest.kernel["name"]}
    rows = silent.activity()
    mean = rows[rows["sequence"].isin(range(2))]["nnz_01"].mean()  # of the batch's real rows: near, padding aside
    assert first.set_index(["layer", "op"]).loc[(1, "ffn_sparse"), "nnz_mean"] == pytest.approx(mean, rel=0.3)
