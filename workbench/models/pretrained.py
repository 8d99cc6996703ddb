"""Read a checkpoint to go on training it, with a ReLU in the place of its activation.

What it says of the model (layers, widths, heads, vocabulary) replaces what a recipe says. Its tokenizer reads the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from twell.workbench.errors import UserError
from twell.workbench.models import weights
from twell.workbench.models.checkpoint import find, fingerprint, understood

KINDS = {"llama": True, "nemotron": False}  # families that training runs: whether their FFN is gated


@dataclass(frozen=True)
class Pretrained:
    """A checkpoint to go on from.

    network: in float32 on the CPU; activation: its own; tokenizer: its fast form's; mark: the token that opens a text
    """

    name: str
    sha256: str
    network: Any
    activation: str
    tokenizer: Tokenizer
    mark: str

    def recipe_fields(self) -> dict[str, Any]:
        """Return the fields of a recipe that the checkpoint decides."""
        config = self.network.config
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return {
            "layers": config.num_hidden_layers,
            "d_model": config.hidden_size,
            "d_ff": config.intermediate_size,
            "gated": KINDS[config.model_type],
            "head_size": head_size,
            "kv_heads": config.num_key_value_heads,
            "vocab": config.vocab_size,
        }

    def record(self) -> dict[str, Any]:
        """Return what a training writes down of it."""
        return {"name": self.name, "weights": self.sha256, "activation": self.activation}


def read_pretrained(model: str, seq_len: int, activations: tuple[str, ...]) -> Pretrained:
    """Read a checkpoint. seq_len: tokens of a row; activations: names of those that training runs.

    Raises UserError for a model that cannot be trained here.
    """
    folder, name, _ = find(model, None, 0.0)
    checkpoint = understood(folder, name, 0.0)
    config: Any = checkpoint.config
    family = str(config.model_type)
    if family not in KINDS or (checkpoint.family is not None and checkpoint.family.base):
        got = checkpoint.fields.get("model_type")
        raise UserError(f"Expected a model of model_type {' or '.join(KINDS)} to go on training, got {got} in {name}.")
    if config.hidden_act not in activations:
        raise UserError(f"Expected {', '.join(activations)} in the FFNs of {name}, got {config.hidden_act}.")
    if seq_len > config.max_position_embeddings:
        raise UserError(
            f"Expected a recipe with a seq_len of at most {config.max_position_embeddings}, the context of {name}, got "
            f"{seq_len}: lower it."
        )
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    mark = tokenizer.bos_token or tokenizer.eos_token
    if not tokenizer.is_fast or mark is None:
        raise UserError(f"Expected a fast tokenizer with a token that opens or ends a text beside {name}, got none.")
    network = weights.read(checkpoint, torch.float32)
    return Pretrained(name, fingerprint(folder), network, config.hidden_act, tokenizer.backend_tokenizer, mark)
