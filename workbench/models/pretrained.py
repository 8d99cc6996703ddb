"""Read a checkpoint to go on training it with a ReLU in the place of its activation, or to be a training's teacher.

What the first says of the model (layers, widths, heads, vocabulary) replaces what a recipe says; its tokenizer reads
the text. A teacher is any model of that vocabulary: half of the objective is then the divergence of the trained model's
next-token distribution from the teacher's, half the text's own tokens (Hinton, Vinyals and Dean, 2015, at temperature
1). The cost is a forward pass of the teacher for each step, and its logits in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoTokenizer

from twell.workbench.errors import UserError
from twell.workbench.models import weights
from twell.workbench.models.checkpoint import find, fingerprint, understood

TEACHER_SHARE = 0.5  # of the objective that is the divergence from the teacher
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


@dataclass(frozen=True)
class Teacher:
    """A model that is not trained. network: of transformers, with its own activation"""

    name: str
    sha256: str
    network: Any

    def record(self) -> dict[str, Any]:
        """Return what a training writes down of it."""
        return {"name": self.name, "weights": self.sha256, "share": TEACHER_SHARE}

    def to(self, device: torch.device) -> Teacher:
        """Move the network to a device, in bfloat16 on a GPU; return the teacher."""
        self.network.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        return self

    @torch.no_grad()
    def logits(self, ids: Tensor) -> Tensor:
        """Return logits [rows, n, vocab] of ids [rows, n]."""
        logits: Tensor = self.network(input_ids=ids, use_cache=False).logits
        return logits


def read_teacher(model: str, tokenizer: Tokenizer, vocab: int, seq_len: int) -> Teacher:
    """Read a teacher of any family of transformers.

    tokenizer, vocab, seq_len: of the training. Raises UserError for a teacher of another vocabulary or a shorter
    context.
    """
    folder, name, _ = find(model, None, 0.0)
    checkpoint = understood(folder, name, 0.0)
    config: Any = checkpoint.config.get_text_config()
    theirs: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if theirs.get_vocab() != tokenizer.get_vocab() or config.vocab_size != vocab:
        raise UserError(
            f"Expected a teacher of the model's own vocabulary, {vocab:,} tokens, got another one of "
            f"{config.vocab_size:,} in {name}: name a model with the same tokenizer, such as that of --from."
        )
    longest = getattr(config, "max_position_embeddings", seq_len)
    if longest < seq_len:
        raise UserError(
            f"Expected a teacher with a context of at least {seq_len} tokens, the recipe's seq_len, got {longest} in "
            f"{name}: lower seq_len."
        )
    network: Any = weights.read(checkpoint, torch.float32)
    return Teacher(name, fingerprint(folder), network.eval().requires_grad_(False))
