"""Captures in which no token can be counted: said in one sentence, with exit code 2, the run kept. Cost: 10 s."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.captures import run_capture

from twell.workbench.capturing.command import capture
from twell.workbench.capturing.progress import outcome
from twell.workbench.cli import main
from twell.workbench.errors import UserError
from twell.workbench.models.load import load
from twell.workbench.options import CaptureOptions
from twell.workbench.run.checks.uncounted import counts_no_token, is_nowhere_finite
from twell.workbench.run.schema import FLAG_NOT_FINITE
from twell.workbench.run.store import Run, open_run

Capture = Callable[..., tuple[Run, str, str]]


@pytest.fixture
def overflowing(tiny: Path, tmp_path: Path) -> Path:
    """Save a model of huge but finite weights, whose gates overflow at every token."""
    folder = Path(shutil.copytree(tiny, tmp_path / "overflowing"))
    path = folder / "model.safetensors"
    stored = load_file(path)
    huge = {name: tensor.sign() * 3e38 for name, tensor in stored.items() if "gate_proj" in name}
    save_file(stored | huge, path, metadata={"format": "pt"})
    return folder


@pytest.fixture
def captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Capture:
    """Run `twell capture`; give the run that is there afterwards, the output and the sentence of the refusal."""

    def run(model: Path, text: Path | str, *options: str, out: str = "run") -> tuple[Run, str, str]:
        words = ["capture", str(model), "--text", str(text), "--out", str(tmp_path / out), "--device", "cpu", *options]
        monkeypatch.setattr(sys, "argv", ["twell", *words])
        with pytest.raises(SystemExit) as stopped:
            main()
        output, error = capsys.readouterr()
        assert stopped.value.code == 2
        assert error.count("\n") == 1, error
        return open_run(tmp_path / out), output, error

    return run


@pytest.mark.parametrize(
    "options",
    [(), ("--probes", "counts", "--no-loss"), ("--generate", "3", "--seq-len", "16"), ("--batch-tokens", "64")],
)
def test_a_model_whose_values_overflow(
    options: tuple[str, ...], overflowing: Path, texts: tuple[str, ...], captured: Capture
) -> None:
    run, output, error = captured(overflowing, texts[0], *options)
    assert "no token counted" in output
    assert "%" not in output + error
    tokens = run.manifest.tokens
    assert f"at {tokens} of its {tokens} tokens an FFN had values that are not finite" in error
    assert run.manifest.status == "complete"
    assert counts_no_token(run) and is_nowhere_finite(run)
    assert run.damaged() == []


def test_sequences_of_one_token(tiny: Path, tmp_path: Path, captured: Capture) -> None:
    """A text of them for a tokenizer that puts nothing before each."""
    bare = Path(shutil.copytree(tiny, tmp_path / "bare"))
    stored = json.loads((bare / "tokenizer.json").read_text(encoding="utf-8"))
    (bare / "tokenizer.json").write_text(json.dumps(stored | {"post_processor": None}), encoding="utf-8")
    letters = tmp_path / "letters.jsonl"
    letters.write_text("".join(json.dumps({"text": letter}) + "\n" for letter in "abcdefgh"))
    run, output, error = captured(bare, letters, out="letters")
    assert run.manifest.tokens == run.manifest.sequences == 8
    assert "no token counted" in output and "%" not in output + error
    assert "each of its 8 tokens is special or the first of its sequence" in error
    assert counts_no_token(run) and not is_nowhere_finite(run)


def test_a_run_that_counts_some_tokens_is_no_such_run(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    run = run_capture(tiny, tmp_path / "run", texts[:1])
    assert not counts_no_token(run) and not is_nowhere_finite(run)
    assert "7 counted, mean nnz 26.4 of 264 (sparsity 90.00%)" in outcome(run, 26.4, 7)
    assert "among them" not in outcome(run, 26.4, 7)


def test_a_loss_over_generated_tokens_is_said_to_be_one(tiny: Path, tmp_path: Path, texts: tuple[str, ...]) -> None:
    """The model finds likely what it writes: such a loss is no measure of the text."""
    run = run_capture(tiny, tmp_path / "run", texts[:1], generate=2)
    assert outcome(run, 26.4, 7).endswith(" nats, generated tokens among them.")


def test_verify_refuses_logits_that_are_not_finite(
    overflowing: Path, texts: tuple[str, ...], captured: Capture, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run, _, _ = captured(overflowing, texts[0])
    monkeypatch.setattr(sys, "argv", ["twell", "verify", str(run.path), "--model", str(overflowing)])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "Expected finite logits from overflowing to compare, got NaN or infinity" in capsys.readouterr().err


def test_tokens_that_are_left_out_are_counted(tiny: Path, tmp_path: Path, texts: tuple[str, ...], capsys: Any) -> None:
    """A token has an embedding of NaN: in its sequences values are not finite."""
    options = CaptureOptions(model=str(tiny), text=(texts[0],), out=tmp_path / "whole", device="cpu", seq_len=8)
    ids = capture(options).frame("activity", ["token_id"])["token_id"]
    token_id = next(token_id for token_id in ids[10:] if token_id not in set(ids[:10]))
    folder = Path(shutil.copytree(tiny, tmp_path / "partly"))
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if "embed_tokens" in name)
    stored[name][token_id] = float("nan")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    run = capture(replace(options, model=str(folder), out=tmp_path / "run"))
    nonfinite = int((run.frame("activity", ["flags"])["flags"] & FLAG_NOT_FINITE != 0).sum())
    assert 0 < nonfinite < run.manifest.tokens
    assert f"{nonfinite:,} of its {run.manifest.tokens:,} tokens are left out of every statistic" in (
        " ".join(capsys.readouterr().out.split())
    )


def test_embeddings_whose_squares_overflow(tiny: Path, tmp_path: Path) -> None:
    """A norm would make zeros of them: no neuron fires, which is not a sparsity of 100 %."""
    folder = Path(shutil.copytree(tiny, tmp_path / "large"))
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if "embed_tokens" in name)
    save_file(stored | {name: stored[name].sign() * 1e37}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"^Expected embeddings in .* got values up to 1\.0e\+37, of which a norm makes"
    ):
        load(str(folder), device="cpu")
