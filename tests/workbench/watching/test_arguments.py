"""Wrong arguments of what notebooks call, each one sentence at the call, where they were taken for others before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from twell.workbench import ablate, capture, study, use_sparse_ffns, watch
from twell.workbench.errors import UserError

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


def test_a_truth_value_is_no_layer(small: Any) -> None:
    """Once it was said that a file could not be read."""
    with torch.no_grad(), watch(small, fired=True) as w:
        small(torch.arange(1, 9)[None])
    with pytest.raises(UserError, match="Expected a layer from 0 to 1, got True"):
        w.fired(True)
