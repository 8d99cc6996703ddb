"""What watching costs: whole captures against the same passes without it. Cost: 5 s."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import capture_cost
from support.capture_cost import Turn, in_turns, ratios

from twell.workbench.models.load import load
from twell.workbench.options import CaptureOptions
from twell.workbench.text.sequences import documents, sequences


def test_what_lies_between_the_beginning_and_the_end_of_a_turn() -> None:
    assert Turn(whole=10.0, start=1.0, end=2.0, batches=(5, 6), timings=0.5).steady == 6.5


@pytest.mark.alone
def test_whole_captures_in_turns(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    options = CaptureOptions(model=str(tiny), text=texts, out=tmp_path / "unused", seq_len=24, batch_tokens=64)
    loaded = load(str(tiny), device="cpu")
    costs = ratios(in_turns(loaded, options, rounds=2, folder=tmp_path))
    assert min(costs["counts_over_unwatched"], costs["all_over_unwatched"]) > 1
    assert costs["dense_over_unwatched_low"] <= costs["dense_over_unwatched"] <= costs["dense_over_unwatched_high"]
    assert costs["tokens"] == sum(len(one.ids) for one in sequences(documents(texts), loaded.tokenizer, 24))
    assert costs["batches"] > 5 and costs["rounds"] == 2
    assert costs["counts_timings"] > 0 == costs["unwatched_timings"]
    for name in ("unwatched", "counts", "all", "dense"):
        parts = [costs[f"{name}_{part}"] for part in ("start", "end", "timings")]
        assert min(parts[:2]) > 0 and sum(parts) < costs[f"{name}_seconds"]
    assert list(tmp_path.iterdir()) == []


def test_every_other_round_goes_the_other_way_about(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CaptureOptions(model=str(tiny), text=texts, out=tmp_path / "unused", seq_len=24, timings=0, tokens=48)
    ran: list[str] = []
    record, run = capture_cost.recorded_turn, capture_cost.unwatched_turn
    monkeypatch.setattr(
        capture_cost,
        "recorded_turn",
        lambda model, given, read: (ran.append(given.probes), record(model, given, read))[1],
    )
    monkeypatch.setattr(
        capture_cost, "unwatched_turn", lambda model, read, loss: (ran.append("unwatched"), run(model, read, loss))[1]
    )
    rounds = in_turns(load(str(tiny), device="cpu"), options, run_dense=False, rounds=3, folder=tmp_path)
    once = ["unwatched", "counts", "all"]
    assert ran == [*once, *once, *reversed(once), *once]  # a few batches of each first
    assert [[*turns] for turns in rounds] == [once] * 3
