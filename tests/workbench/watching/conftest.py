"""Small models as transformers loads them, and a padded batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captures import save_model
from support.watched import PAD, SENTENCES
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def load_object() -> Callable[..., Any]:
    """Load a folder with transformers alone, in float64."""

    def load(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    return load


@pytest.fixture(scope="session")
def tokenizer(tiny: Path) -> PreTrainedTokenizerFast:
    """Return the small models' tokenizer, with a padding token of its own."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.padding_side = "left"
    return tokenizer


@pytest.fixture
def model(tiny: Path, load_object: Callable[..., Any]) -> Any:
    return load_object(tiny)


@pytest.fixture
def small() -> Any:
    """Make a Llama of two layers."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    config = LlamaConfig(**sizes, num_attention_heads=2, hidden_act="relu")
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def compiler() -> Callable[..., Any]:
    """Return torch.compile without what it compiled before, of which it keeps eight forms of a function."""
    torch.compiler.reset()
    return torch.compile


@pytest.fixture(params=["opt", "nemotron", "qwen3", "mistral"])
def family(request: pytest.FixtureRequest, tmp_path: Path, load_object: Callable[..., Any]) -> Any:
    """Return a small model of a family other than that of `model`; OPT's FFN is plain and has biases, Nemotron's plain
    and squared."""
    act = {"nemotron": {"hidden_act": "relu2"}}.get(request.param, {})
    return load_object(save_model(tmp_path / request.param, request.param, **act))


@pytest.fixture(scope="session")
def batch(tokenizer: PreTrainedTokenizerFast) -> Any:
    """Return a batch padded on the left with a token that stands nowhere else."""
    given = tokenizer(list(SENTENCES), return_tensors="pt", padding=True, return_token_type_ids=False)
    given["input_ids"][given["attention_mask"] == 0] = PAD
    return given
