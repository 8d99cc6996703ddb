"""Wrong arguments of what notebooks call, each one sentence at the call, where they were taken for others before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twell.workbench import ablate, capture, study, use_sparse_ffns, watch
from twell.workbench.ablations import from_objects
from twell.workbench.errors import UserError
from twell.workbench.option_fields import python_names
from twell.workbench.options import CaptureOptions

TEXTS = ["the cat sat on the mat"]
KERNELS = "kernel= as one of auto, reference, cpu, cuda, hopper, got 'x'"
WRONG: dict[str, Callable[[Any, Path], Any]] = {
    f"{KERNELS}.": lambda small, _: watch(small, kernel="x"),  # type: ignore[arg-type]
    f"{KERNELS}. ": lambda small, _: use_sparse_ffns(small, kernel="x"),  # type: ignore[arg-type]
    "no tokenizer= beside": lambda _, folder: capture(folder, TEXTS, tokenizer=object()),  # type: ignore[arg-type]
    "no tokenizer= beside ": lambda _, folder: study(folder, TEXTS, tokenizer=object()),  # type: ignore[arg-type]
    "conditions as text, such as ffn@3, got 3": lambda small, _: study(small, TEXTS, 3),  # type: ignore[arg-type]
    "texts as strings, paths or sources, got a dict": lambda small, _: capture(small, {"a": 1}),  # type: ignore[arg-type]
    "texts as strings, paths or sources, got a bytes": lambda small, _: capture(small, b"x"),  # type: ignore[arg-type]
    "a layer from 0 to 1 of LlamaForCausalLM, got True": lambda small, _: ablate(small, {True: [1]}).__enter__(),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_arguments(small: Any, tiny: Path, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        WRONG[sentence](small, tiny)
    assert f"Expected {sentence.strip()}" in str(raised.value)


SHARED: dict[str, Callable[[Any, Path], Any]] = {  # with the command line, whose names errors had: what they say now
    "Expected fired= as LAYERS": lambda folder, _: capture(folder, TEXTS, fired="x"),
    "Expected generate= of less than .* raise seq_len=": lambda folder, _: capture(folder, TEXTS, generate=10**6),
    "Expected seq_len= of at most": lambda folder, _: capture(folder, TEXTS, seq_len=10**6),
    r"Expected revision= with a hub id .*: leave revision=": lambda folder, _: capture(folder, TEXTS, revision="x"),
    r"Expected out= in a folder .*: choose another out=\.": lambda folder, _: capture(folder, TEXTS, out="/proc/x"),
    r"Expected fired= as LAYERS\[": lambda folder, small: watch(small, fired="x").__enter__(),
}


@pytest.mark.parametrize("sentence", SHARED)
def test_errors_name_arguments(small: Any, tiny: Path, sentence: str) -> None:
    with pytest.raises(UserError, match=f"^{sentence}") as raised:
        SHARED[sentence](tiny, small)
    assert "--" not in str(raised.value)


def test_a_study_names_its_arguments(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: object) -> None:
        raise UserError("lower --batch-tokens, or leave a --condition out.")

    monkeypatch.setattr(from_objects, "measure", measure)
    with pytest.raises(UserError, match=r"^lower batch_tokens=, or leave a conditions= out\.$"):
        study(tiny, TEXTS, "ffn")


@pytest.mark.parametrize(
    ("said", "here"),
    [
        ("use --device cpu, or `twell capture --device cpu`.", 'use device="cpu", or `twell capture --device cpu`.'),
        ("add --no-loss, or lower --batch-tokens.", "add loss=False, or lower batch_tokens=."),
        ("count above --threshold 0.01; --resume goes on.", "count above threshold=0.01; resume=True goes on."),
        ("give the same --text, which --other has not.", "give the same texts=, which --other has not."),
    ],
)
def test_options_as_arguments(said: str, here: str) -> None:
    with pytest.raises(UserError) as raised, python_names(CaptureOptions, text="texts"):
        raise UserError(said)
    assert str(raised.value) == here


def test_a_truth_value_is_no_layer(small: Any) -> None:
    """Once it was said that a file could not be read."""
    with torch.no_grad(), watch(small, fired=True) as w:
        small(torch.arange(1, 9)[None])
    with pytest.raises(UserError, match="Expected a layer from 0 to 1, got True"):
        w.fired(True)


def test_ranks_take_a_folder_each(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both when a watch begins, and when another rank was the first to write after that."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with torch.no_grad():
        begun = watch(small, out=tmp_path).__enter__()
        (tmp_path / "of_another_rank").touch()
        small(torch.arange(1, 9)[None])
        with pytest.raises(UserError, match="of 2 ranks, give each a folder of its own"):
            begun.__exit__(None, None, None)
    with pytest.raises(UserError, match="of 2 ranks, give each a folder of its own"):
        watch(small, out=tmp_path).__enter__()
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(UserError, match=r"choose another folder\.$"):
        watch(small, out=tmp_path).__enter__()


@pytest.mark.parametrize("options", [{}, {"probes": "counts"}, {"rows": False, "dense": True}])
def test_metrics_have_the_same_names_before_the_first_token(small: Any, options: dict[str, Any]) -> None:
    with torch.no_grad(), watch(small, **options) as w:
        empty = w.metrics()
        small(torch.arange(1, 9)[None])
        assert list(empty) == list(w.metrics()) == list(w.metrics())
