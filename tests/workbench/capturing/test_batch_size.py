"""Batches that fit: how large they are on a GPU, and what happens where its memory does not hold one. Cost: 5 s."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import run_capture

from twell.workbench.capturing import recorder
from twell.workbench.capturing.batch_size import (
    LEAST,
    MOST,
    about_batches,
    about_tokens,
    fitting_rows,
    fixed_bytes,
    if_it_fits,
    row_bytes,
)
from twell.workbench.errors import UserError
from twell.workbench.options import CaptureOptions
from twell.workbench.text.batches import Batch, split
from twell.workbench.text.sequences import Sequence

SHAPE = {"layers": 28, "d_model": 2048, "d_ff": 5632}
ON_A_GPU = torch.OutOfMemoryError("CUDA out of memory")
ON_A_CPU = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


def of_lengths(*lengths: int, ends: bool = True) -> Batch:
    sequences = tuple(Sequence(0, "text", 0, np.arange(length, dtype=np.int32)) for length in lengths)
    return Batch(0, np.arange(3, 3 + len(lengths), dtype=np.int32), sequences, np.zeros(0, np.int32), ends=ends)


@pytest.mark.parametrize("examples", [0, 8])
def test_rows_by_memory(examples: int) -> None:
    loaded: Any = SimpleNamespace(**SHAPE, model=SimpleNamespace(dtype=torch.bfloat16))
    options = CaptureOptions(model="m", text=("t",), out=Path("r"), examples=examples)
    rows = [fitting_rows(loaded, options, int(gigabytes * 1e9)) for gigabytes in (1, 6, 12, 24, 80, 140)]
    assert rows == sorted(rows) and rows[0] == LEAST and rows[-1] == MOST
    assert all(LEAST <= one <= MOST and one & (one - 1) == 0 for one in rows)
    for gigabytes, one in zip((12, 24), rows[2:4], strict=True):
        needed = fixed_bytes(loaded, options) + np.array([1, 2]) * one * row_bytes(loaded, options)
        assert needed[0] <= 0.8e9 * gigabytes < needed[1]
    for tokens, rows_of_text in ((None, MOST), (10**7, MOST), (600_000, 65_536), (70_000, 8192), (100, 8192)):
        assert fitting_rows(loaded, options, 140 * 10**9, tokens) == rows_of_text
    few = replace(options, tokens=1000)
    assert about_tokens(options, [4000, 4000], 1) == 2000 and about_tokens(options, [4000, None], 2) is None
    assert about_tokens(few, [4000, 4000], 2) == about_tokens(few, [None], 2) == 500
    generating = replace(options, generate=64)
    assert fitting_rows(loaded, generating, 24 * 10**9) < fitting_rows(loaded, options, 24 * 10**9)
    assert about_batches(MOST, options) == ", batches of 131,072 tokens by the GPU's memory"
    assert about_batches(8192, options) == ""


def test_split_keeps_every_sequence() -> None:
    batch = of_lengths(5, 4, 5, 3, 5, 2, 1)
    for rows in (1, 5, 12, 20, 35, None):
        parts = split(batch, rows)
        assert np.concatenate([part.numbers for part in parts]).tolist() == batch.numbers.tolist()
        assert [one for part in parts for one in part.sequences] == list(batch.sequences)
        assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
        assert all(len(part.sequences) == 1 or rows is None or part.padded <= rows for part in parts)
    assert not any(part.ends for part in split(of_lengths(5, 5, ends=False), 5))


def rows_at_most(monkeypatch: pytest.MonkeyPatch, most: int, error: Exception = ON_A_GPU) -> list[int]:
    """Let a forward pass of more rows run out of memory; return the list that the rows of each pass go to."""
    ran, plain = list[int](), recorder.forward

    def forward(loaded: Any, inputs: Any, **about: Any) -> Any:
        ran.append(len(inputs.ids))
        if ran[-1] > most:
            raise error
        return plain(loaded, inputs, **about)

    monkeypatch.setattr(recorder, "forward", forward)
    return ran


def test_a_capture_goes_without_its_last_pass_where_memory_does_not_hold_it(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would run its one batch again, to time dense layers on a device that is warm."""
    ran, plain = list[int](), recorder.forward

    def forward(loaded: Any, inputs: Any, **about: Any) -> Any:
        ran.append(len(inputs.ids))
        if len(ran) == 2:
            raise ON_A_CPU
        return plain(loaded, inputs, **about)

    monkeypatch.setattr(recorder, "forward", forward)
    run = run_capture(tiny, tmp_path / "run", texts[:1], batch_tokens=10_000, timings=1)
    assert len(ran) == 2 and ran[0] == ran[1]
    assert run.manifest.status == "complete" and len(run.frame("activity")) > 0


def test_another_error_is_not_taken_for_too_little_memory() -> None:
    def run(batch: Batch) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        if_it_fits(run, of_lengths(3))


@pytest.mark.parametrize("error", [ON_A_GPU, ON_A_CPU])
def test_a_batch_too_large_is_halved(
    error: Exception,
    tiny: Path,
    tmp_path: Path,
    texts: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And halved again with those that wait; later ones begin with that size; the run is the same, and its manifest has
    the size that was asked for."""
    about: dict[str, Any] = {"examples": 2, "batch_tokens": 60, "seq_len": 10}
    whole = run_capture(tiny, tmp_path / "whole", texts, torch.float64, **about)
    capsys.readouterr()
    ran = rows_at_most(monkeypatch, 12, error)
    run = run_capture(tiny, tmp_path / "halved", texts, torch.float64, **about)
    halvings = [line for line in capsys.readouterr().out.splitlines() if "memory does not hold" in line]
    failed = [rows for rows in ran if rows > 12]
    assert len(failed) == len(halvings) == 2 and len(ran) > 20
    assert halvings[0] == (
        f"The device's memory does not hold a batch of {failed[0]} rows: from here on they have up to {failed[0] // 2}."
    )
    assert run.manifest.options["batch_tokens"] == whole.manifest.options["batch_tokens"] == 60
    for table, keys in (
        ("activity", ["sequence", "position"]),
        ("sequences", ["sequence"]),
        ("neurons", ["layer", "neuron"]),
        ("value_bins", ["layer", "neuron", "bin"]),
        ("examples", ["layer", "neuron", "kind", "sequence", "position"]),
    ):
        ours, theirs = (one.frame(table).sort_values(keys, ignore_index=True) for one in (run, whole))
        counts = [name for name in ours if ours[name].dtype.kind in "iu"]
        assert ours[[*counts]].equals(theirs[[*counts]]), table


def test_one_sequence_that_does_not_fit(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_at_most(monkeypatch, 10)
    with pytest.raises(UserError, match=r"Expected memory for one sequence of .* tokens, .* lower --seq-len"):
        run_capture(tiny, tmp_path / "run", texts, torch.float64, batch_tokens=200)
