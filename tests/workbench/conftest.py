"""A small model, texts, a training recipe, and refused captures."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captures import TEXT, save_model

from twell.kernels.dispatch import choose
from twell.workbench.cli import main
from twell.workbench.training.recipes import Recipe


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Compile kernels before the first test, as the line that says so would stand in a command's output."""
    choose("cpu", torch.float32, 64, 64, 1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small Llama; tests that change its files copy it first."""
    return save_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Write text files of very different lengths."""
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(TEXT):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return tuple(str(folder / f"{number}.txt") for number in range(len(TEXT)))


@pytest.fixture(scope="session")
def tiny_recipe() -> Recipe:
    """Return a recipe that trains in seconds on a CPU, to a sparse model."""
    return Recipe(
        name="tiny",
        layers=2,
        d_model=32,
        d_ff=96,
        head_size=16,
        kv_heads=1,
        vocab=400,
        seq_len=32,
        steps=60,
        rows=8,
        warmup=5,
        l1=0.03,
        l1_warmup=10,
        log_every=10,
        evaluations=3,
    )


@pytest.fixture
def refused(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Callable[..., str]:
    """Return a function that runs `twell capture` with one thing wrong, sees that nothing is written, and returns the
    sentence that it prints."""

    def run(*options: str, model: Path | str = tiny, text: Path | str = texts[0], out: Path = tmp_path / "run") -> str:
        before = _files(out)
        words = ["twell", "capture", str(model), "--text", str(text), "--out", str(out), *options]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stopped:
            main()
        message = capsys.readouterr().err.strip()
        assert stopped.value.code == 2, message
        assert _files(out) == before
        assert message.startswith("twell: "), message
        assert message.count("\n") == 0, message
        assert message.endswith("."), message
        return message

    return run


def _files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
