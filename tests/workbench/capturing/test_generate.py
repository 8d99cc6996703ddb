"""Generation as it is captured: where it ends, what its tables hold, its draws, and what is refused. Cost: 10 s."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.captures import counts_of, ends_with, run_capture, run_plain, save_model, sequences_of

from twell.workbench.capturing.command import record
from twell.workbench.capturing.recorder import Recorder
from twell.workbench.capturing.resume import new_manifest
from twell.workbench.cli import main
from twell.workbench.models.load import load
from twell.workbench.options import CaptureOptions
from twell.workbench.run.schema import DECODE, PREFILL, nnz_columns
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.writer import RunWriter
from twell.workbench.text import batches as batching
from twell.workbench.text.repeats import Repeats
from twell.workbench.text.sequences import Sequence as Text
from twell.workbench.text.sources import TextSource
from twell.workbench.text.vocabulary import special_ids

FURTHER = 7
GIVEN: dict[str, Any] = {"generate": FURTHER, "batch_tokens": 120, "seq_len": 31}


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a model that ends its sequences with a token that it does not generate in these tests."""
    folder = save_model(tmp_path_factory.mktemp("endless") / "model")
    ends_with(folder, 2)
    return folder


def test_an_end_in_mid_batch(tmp_path: Path, texts: tuple[str, ...], endless: Path) -> None:
    """Sequences end with their end, which is a row; what is padded behind it is none; the others go on."""
    free = sequences_of(run_capture(endless, tmp_path / "free", texts, torch.float64, **GIVEN), DECODE)
    ends = [int(free[1][2]), int(free[4][4])]
    folder = save_model(tmp_path / "model")
    ends_with(folder, ends)
    run = run_capture(folder, tmp_path / "run", texts, torch.float64, **GIVEN)
    expected = [one[: np.flatnonzero(np.isin(one, ends)).min(initial=FURTHER) + 1] for one in free]
    assert [one.tolist() for one in sequences_of(run, DECODE)] == [one.tolist() for one in expected]
    lengths = {len(one) for one in expected}
    assert FURTHER in lengths and len(lengths) > 2
    np.testing.assert_array_equal(counts_of(run), run_plain(folder, sequences_of(run), torch.float64).nnz)
    alone = run_capture(folder, tmp_path / "alone", texts, torch.float64, **GIVEN | {"batch_tokens": 1})
    assert alone.arrow("activity").equals(run.arrow("activity"))  # without padding, and with


def test_an_end_within_a_prompt_ends_nothing(tmp_path: Path) -> None:
    """Several documents in one prompt, with the mark between them that is also the end of a sequence."""
    folder = save_model(tmp_path / "model")
    ends_with(folder, 0)
    path = tmp_path / "packed.txt"
    path.write_text("ab<|endoftext|>cd<|endoftext|>")
    rows = run_capture(folder, tmp_path / "run", (str(path),), torch.float64, **GIVEN).activity()
    assert rows["token_id"][[0, 3, 6]].tolist() == [0, 0, 0]
    assert rows["flags"][[0, 3, 6]].tolist() == [3, 1, 1]
    assert rows["phase"].tolist() == [PREFILL] * 7 + [DECODE] * (len(rows) - 7)
    assert len(rows) > 8


def again(folder: Path, run: Run, out: Path, options: CaptureOptions) -> Run:
    """Run the run's sequences once more, generated tokens included, as any text: padded on the right."""
    loaded = load(str(folder), device="cpu", dtype=torch.float64)
    marks, pieces = Repeats(), []
    for _, rows in run.activity().groupby("sequence"):
        prompt = rows.loc[rows["phase"] != DECODE, "token_id"].to_numpy()  # what is generated is never marked
        pieces.append(Text(0, "again", 0, rows["token_id"].to_numpy(), marks.mark(prompt)))
    recorder = Recorder(loaded, RunWriter(out, new_manifest(loaded, options, list(options.text))), options)
    for batch in batching.batches(pieces, 100, special_ids(loaded.tokenizer)):
        recorder.step(batch)
    recorder.finish("complete", [])
    return open_run(out)


def test_every_table_is_that_of_the_same_text_read(endless: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    kept: dict[str, Any] = {"examples": 2, "fired": "all", "probes": "all"}
    run = run_capture(endless, tmp_path / "run", texts, torch.float64, **GIVEN, **kept)
    options = CaptureOptions(model=str(endless), text=texts, out=tmp_path / "other", timings=0, **kept)
    other = again(endless, run, tmp_path / "other", options)
    for table in ("activity", "neurons", "tiles", "unions", "examples", "fired"):
        ours, theirs = (one.frame(table).drop(columns=["phase"], errors="ignore") for one in (run, other))
        keys = {"activity": ["sequence", "position"], "fired": ["sequence", "position", "layer"]}.get(table)
        if keys is not None:
            ours, theirs = (one.sort_values(keys, ignore_index=True) for one in (ours, theirs))
        assert len(ours) > 10, table
        for name in ours.columns:
            if name in ("window", "value") and table in ("examples", "fired"):
                for one, two in zip(ours[name], theirs[name], strict=True):
                    np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-5)
            else:
                near = {"loss": 1e-3, "value_sum": 1e-6, "value_max": 1e-6}.get(name, 0)
                pd.testing.assert_series_equal(ours[name], theirs[name], check_dtype=False, rtol=near, atol=0)


def test_a_value_that_is_not_finite(endless: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    """In what is generated: from there on its sequence is flagged, and in no sum; no other one is."""
    loaded = load(str(endless), device="cpu", dtype=torch.float64)
    steps = [0]

    def spoil(_module: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        steps[0] = 0 if inputs[0].shape[1] > 1 else steps[0] + 1
        x = inputs[0].clone()
        if steps[0] == 3:
            x[0] = torch.inf
        return (x,)

    loaded.ffns[0].register_forward_pre_hook(spoil)
    options = CaptureOptions(
        model=str(endless), text=texts, out=tmp_path / "run", timings=0, **GIVEN | {"batch_tokens": 10**6}
    )
    rows = record(loaded, options, [TextSource(name) for name in texts]).activity()
    spoilt = rows[rows["flags"] >= 4]
    assert set(spoilt["sequence"]) == {0} and (spoilt["phase"] == DECODE).all() and len(spoilt) == FURTHER - 2
    neurons = open_run(tmp_path / "run").frame("neurons")
    plain = rows[rows["flags"] == 0]
    for layer, name in enumerate(nnz_columns(3)):
        assert neurons["fires"][neurons["layer"] == layer].sum() == plain[name].sum()


def test_draws_are_those_of_the_seed(endless: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    def drawn(name: str, **given: Any) -> list[list[int]]:
        torch.manual_seed(len(name))  # of no account
        run = run_capture(endless, tmp_path / name, texts, **GIVEN, **given)
        return [one.tolist() for one in sequences_of(run, DECODE)]

    first = drawn("first", temperature=2.0, seed=1)
    assert drawn("again", temperature=2.0, seed=1) == first
    assert drawn("other", temperature=2.0, seed=2) != first != drawn("likeliest")


def test_timings_have_their_phase(endless: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    silent = run_capture(endless, tmp_path / "silent", texts, **GIVEN)
    run = run_capture(endless, tmp_path / "run", texts, **GIVEN | {"timings": 1})
    assert run.arrow("activity").equals(silent.arrow("activity"))
    assert run.arrow("neurons").equals(silent.arrow("neurons"))
    frame = run.frame("timings")
    first = frame[(frame["batch"] == 0) & (frame["op"] == "ffn_sparse")].set_index(["layer", "phase"])["tokens"]
    assert set(first.index) == {(layer, phase) for layer in range(3) for phase in (PREFILL, DECODE)}
    assert first[0, PREFILL] > first[0, DECODE] > 0
    assert set(frame["op"][frame["phase"] == DECODE]) >= {"ffn_dense", "ffn_sparse", "gate"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--generate", "128"], "--generate of less than the 128 tokens of a sequence"),
        (["--generate", "9", "--seq-len", "9"], "--generate of less than the 9 tokens of a sequence"),
        (["--generate", "-1"], "--generate of at least 0, got -1"),
        (["--generate", "2", "--temperature", "-1"], "--temperature of at least 0, got -1"),
    ],
)
def test_what_cannot_be_generated(
    words: list[str], sentence: str, endless: Path, tmp_path: Path, texts: tuple[str, ...], capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    given = ["twell", "capture", str(endless), "--text", texts[0], "--out", str(tmp_path / "run"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [*given, *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    message = capsys.readouterr().err.strip()
    assert (stopped.value.code, message.count("\n")) == (2, 0)
    assert sentence in message
    assert not (tmp_path / "run").exists()
