"""What a capture's own timings and its watching cost, and that they change no count. Cost: 10 s."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twell.workbench import timing
from twell.workbench.capture import record
from twell.workbench.gauge import Gauge
from twell.workbench.models import load
from twell.workbench.options import CaptureOptions
from twell.workbench.overhead import overhead
from twell.workbench.sources import Source
from twell.workbench.text import documents, sequences


def test_timings_change_no_count(
    run_capture: Callable[..., Any], tiny: Path, tmp_path: Path, texts: tuple[str, ...]
) -> None:
    silent = run_capture(tiny, tmp_path / "silent", texts)
    timed = run_capture(tiny, tmp_path / "timed", texts, timings=1)
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


@pytest.mark.parametrize(("share", "asked"), [(1.0, 2), (0.01, 0)])
def test_power_is_asked_for_once_and_only_when_it_can_be_afforded(
    share: float, asked: int, tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = []

    def window(_self: Gauge, operation: Any) -> tuple[float, float]:
        windows.append(operation)
        return 1000.0, 300.0

    monkeypatch.setattr(Gauge, "reads", True)
    monkeypatch.setattr(Gauge, "read", lambda _self: (1000.0, 100.0))
    monkeypatch.setattr(Gauge, "window", window)
    monkeypatch.setattr(timing, "MODEL_EVERY", 1)
    options = CaptureOptions(
        model=str(tiny), text=texts, out=tmp_path / "run", seq_len=24, batch_tokens=64, timings=1, timings_share=share
    )
    frame = record(load(str(tiny), device="cpu"), options, [Source(name) for name in texts]).frame("timings")
    assert len(windows) == asked
    whole = frame[frame["layer"] == -1]
    assert len(whole) > 2 and whole["watts"].notna().sum() == asked


def test_overhead(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    options = CaptureOptions(model=str(tiny), text=texts, out=tmp_path / "unused", seq_len=24, batch_tokens=64)
    loaded = load(str(tiny), device="cpu")
    found = overhead(loaded, options, rounds=2, folder=tmp_path)
    assert min(found["counts_over_unwatched"], found["all_over_unwatched"]) > 1
    assert found["dense_over_unwatched_low"] <= found["dense_over_unwatched"] <= found["dense_over_unwatched_high"]
    assert found["tokens"] == sum(len(one.ids) for one in sequences(documents(texts), loaded.tokenizer, 24))
    assert found["batches"] > 5
    assert found["counts_timings"] > 0 == found["unwatched_timings"]
    for name in ("unwatched", "counts", "all", "dense"):
        parts = [found[f"{name}_{part}"] for part in ("start", "end", "timings")]
        assert min(parts[:2]) > 0 and sum(parts) < found[f"{name}_seconds"]
    assert list(tmp_path.iterdir()) == []
