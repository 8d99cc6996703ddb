"""The worker: one process that stays, reads what a capture would have recorded, and is started anew if it dies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from twell.analysis import by_neuron
from twell.analysis.neurons.at_token import along, beside, neurons_at, ordered
from twell.analysis.neurons.effects import loss_change
from twell.analysis.passage import passage, shaded, shaded_anew
from twell.app.jobs import worker as module
from twell.app.jobs.worker import Reading, WorkerProcess, save_reading
from twell.app.neurons.near_view import with_nearest
from twell.workbench import capture
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run, open_run

DEMO: dict[str, Any] = {
    "model": str(resources.files("twell.data") / "demo-model"),
    "revision": None,
    "threshold": None,
    "weights": None,
}
WORDS = "A lichen grows on the bark of an old tree, a millimetre a year."


def ended(reading: Reading) -> Reading:
    assert reading.done.wait(120)
    return reading


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """One process for this module: starting it is what takes long."""
    worker = WorkerProcess()
    yield worker
    worker.close()
    assert worker.process is None or worker.process.poll() is not None


@pytest.fixture(scope="module")
def captured() -> Run:
    """The same words, by the capture."""
    return capture(DEMO["model"], WORDS, fired="all", timings=0)


def test_a_text_is_read_as_a_capture_reads_it(worker: WorkerProcess, captured: Run) -> None:
    read = ended(worker.ask({**DEMO, "text": WORDS})).run()
    names = ["token_id", "flags", "phase", "loss", *nnz_columns(8)]
    assert read.activity()[names].equals(captured.activity()[names])
    for position in (1, 7):
        assert neurons_at(read, 0, position).equals(neurons_at(captured, 0, position))


def test_one_process_answers_all_and_the_same_question_once(worker: WorkerProcess) -> None:
    first = ended(worker.ask({**DEMO, "text": WORDS}))
    assert worker.process is not None
    process = worker.process.pid
    assert worker.ask({**DEMO, "text": WORDS}) is first
    second = ended(worker.ask({**DEMO, "text": "Moss, too.", "generate": 6}))
    assert worker.process.pid == process
    assert not second.note
    assert (second.run().activity()["phase"] == 1).sum() == 6


def test_visitors_who_ask_the_same_at_once_share_a_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the second one's folder replaces that which the first one's page is reading."""

    def slow(*arguments: Any) -> Reading:
        time.sleep(0.1)
        return Reading(*arguments)

    monkeypatch.setattr(module, "Reading", slow)
    monkeypatch.setattr(WorkerProcess, "_answer", lambda self, reading: reading.done.set())
    shared = WorkerProcess()
    with ThreadPoolExecutor(4) as visitors:
        readings = list(visitors.map(shared.ask, [{"text": WORDS}] * 4))
    assert len({id(reading) for reading in readings}) == 1
    readings[0].error = "It failed."
    assert shared.ask({"text": WORDS}).out != readings[0].out, "asked again it does not write where the first one did"
    shared.close()


def test_a_recorded_passage_is_read_anew_from_its_ids(worker: WorkerProcess, captured: Run) -> None:
    rows = passage(captured, 0)
    anew = ended(worker.ask({**DEMO, "ids": rows["token_id"].tolist()})).run()
    assert passage(anew, 0)[nnz_columns(8)].equals(rows[nnz_columns(8)])
    loudest = neurons_at(anew, 0, 4).iloc[0]["label"]
    assert shaded_anew(rows, anew, loudest, None, 0, 99).equals(shaded(rows, captured, loudest, None, 0, 99))


def test_a_passage_is_read_without_a_neuron_and_then_with_it_again(worker: WorkerProcess, captured: Run) -> None:
    ids = passage(captured, 0)["token_id"].tolist()
    top = neurons_at(captured, 0, 4).iloc[0]
    silent = [(int(top["layer"]), int(top["neuron"]))]
    without = ended(worker.ask({**DEMO, "ids": ids, "silent": silent})).run()
    assert top["label"] not in set(neurons_at(without, 0, 4)["label"])
    with_it = ended(worker.ask({**DEMO, "ids": [*ids, ids[0]]})).run()
    assert neurons_at(with_it, 0, 4).equals(neurons_at(captured, 0, 4)), "the weights are what they were"
    frame = loss_change(captured, without)
    loss = captured.activity()["loss"].to_numpy(float)[:-1]
    assert frame["loss"].tolist() == loss.tolist()
    assert frame["token_id"].tolist() == ids[1:]
    first = along(captured, 0, (silent[0],))["position"].min()
    assert (frame["change"].iloc[:first] == 0).all(), "what stands before its first firing is not changed"
    assert frame["change"].abs().max() > 0.01


def test_neurons_of_a_token_beside_what_the_run_knows_of_them(captured: Run) -> None:
    table = beside(neurons_at(captured, 0, 4), captured)
    counts = captured.activity().set_index("position").loc[4, nnz_columns(8)]
    assert table.groupby("layer").size().reindex(range(8), fill_value=0).tolist() == counts.tolist()
    assert table["share"].between(0, 1.001).all()  # values are kept in 16 bits, the largest in 32
    assert table["value"].is_monotonic_decreasing
    rarest = ordered(table, "density", layer=3)
    assert rarest["density"].is_monotonic_increasing
    assert set(rarest["layer"]) == {3}
    with pytest.raises(Missing, match="holds no token at 400 of sequence 0"):
        neurons_at(captured, 0, 400)


def test_what_cannot_be_read_is_a_sentence_and_the_next_is_read(worker: WorkerProcess, tmp_path: Path) -> None:
    for change, message in (
        ({"model": str(tmp_path / "gone"), "text": WORDS}, "nothing there"),
        ({"weights": "0" * 64, "text": WORDS}, "others in demo-model"),
        ({"ids": [1, 10**6]}, "Expected token ids from 0 to"),
        ({"text": WORDS, "generate": 10**6}, "Expected --generate of less than"),
        ({"text": WORDS, "nonsense": 1}, "could not read this"),
    ):
        with pytest.raises(UserError, match=message):
            ended(worker.ask({**DEMO, **change})).run()
    assert ended(worker.ask({**DEMO, "text": "After all that."})).run().manifest.tokens


def test_a_reading_is_saved_as_a_run_of_its_own(worker: WorkerProcess, tmp_path: Path) -> None:
    read = ended(worker.ask({**DEMO, "text": WORDS})).run()
    saved = save_reading(read, tmp_path / "mine")
    assert saved.name == "mine"
    assert open_run(tmp_path / "mine").activity().equals(read.activity())
    with pytest.raises(UserError, match="mine"):
        save_reading(read, tmp_path / "mine")


def test_how_near_each_neuron_came_to_firing(worker: WorkerProcess, captured: Run) -> None:
    rows = captured.activity()
    texts, counted = [rows["token_id"].tolist()], [(rows["flags"] == 0).tolist()]
    reading = ended(worker.ask({**DEMO, "texts": texts, "counted": counted}))
    assert not reading.error
    frame = pd.read_parquet(reading.out / "nearest.parquet")
    recorded = by_neuron(captured)
    assert frame[["layer", "neuron"]].equals(recorded[["layer", "neuron"]].astype("int64"))
    fires = recorded["fires"].to_numpy() > 0
    np.testing.assert_allclose(
        frame["largest"].clip(lower=0)[fires], recorded["value_max"][fires], rtol=1e-4, atol=1e-5
    )
    assert (frame["largest"][~fires] < 1e-5).all() and (~fires).any()
    assert (frame["sd"] > 0).all() and (frame["mean"] < frame["largest"]).all()
    dead = recorded[~fires].reset_index(drop=True)
    shown = with_nearest(dead, str(reading.out / "nearest.parquet"))
    assert len(shown) == len(dead) and shown["below"].is_monotonic_increasing
    assert set(shown["why"]) == {"near", "far"}
    assert (shown["below"] <= 1).equals(shown["why"] == "near")
    assert "Expected token ids" in ended(worker.ask({**DEMO, "texts": [[10**7]], "counted": [[True]]})).error


def test_the_process_ends_with_its_server_and_the_next_reading_says_that_it_is_another(worker: WorkerProcess) -> None:
    process = worker.process
    assert process is not None and process.stdin is not None
    process.stdin.close()  # as it is when the server is gone, however it ended
    assert process.wait(120) == 0
    reading = ended(worker.ask({**DEMO, "text": "It lives again."}))
    assert reading.run().manifest.tokens
    assert worker.process is not process
    assert "exit code 0" in reading.note and "started anew" in reading.note


def test_a_reading_that_takes_too_long_or_is_stopped_ends(
    worker: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as hurried:
        hurried.setattr(worker, "read_seconds", 0.001)
        with pytest.raises(UserError, match="Expected an answer of the model within"):
            ended(worker.ask({**DEMO, "text": "too late"})).run()
    ended_before = worker.process
    stopped = worker.ask({**DEMO, "text": "words and words"})
    while worker.process is ended_before:  # until the next one is starting
        time.sleep(0.01)
    worker.stop(stopped)
    with pytest.raises(UserError, match="Stopped"):
        ended(stopped).run()
