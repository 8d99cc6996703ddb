"""What watching costs: whole captures against the same passes without it. Cost: 5 s."""

from __future__ import annotations

from pathlib import Path

from twell.workbench.capture_cost import in_turns, ratios
from twell.workbench.models import load
from twell.workbench.options import CaptureOptions
from twell.workbench.text import documents, sequences


def test_whole_captures_in_turns(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    options = CaptureOptions(model=str(tiny), text=texts, out=tmp_path / "unused", seq_len=24, batch_tokens=64)
    loaded = load(str(tiny), device="cpu")
    found = ratios(in_turns(loaded, options, rounds=2, folder=tmp_path))
    assert min(found["counts_over_unwatched"], found["all_over_unwatched"]) > 1
    assert found["dense_over_unwatched_low"] <= found["dense_over_unwatched"] <= found["dense_over_unwatched_high"]
    assert found["tokens"] == sum(len(one.ids) for one in sequences(documents(texts), loaded.tokenizer, 24))
    assert found["batches"] > 5 and found["rounds"] == 2
    assert found["counts_timings"] > 0 == found["unwatched_timings"]
    for name in ("unwatched", "counts", "all", "dense"):
        parts = [found[f"{name}_{part}"] for part in ("start", "end", "timings")]
        assert min(parts[:2]) > 0 and sum(parts) < found[f"{name}_seconds"]
    assert list(tmp_path.iterdir()) == []
