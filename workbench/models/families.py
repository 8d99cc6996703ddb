"""Model families whose FFN the kernels run: where it stands, and what the configuration says of it.

Two of them ship with code of their own, which is never run. Their checkpoints are read as a family of transformers
with an FFN of ours: `llama_sparse_relu`, the checkpoints published with arXiv 2603.23198 (a Llama; the FFN is ReLU
whatever `hidden_act` says), and `bamboo`, those of Bamboo and TurboSparse (a Mistral with a ReLU on the gate and on the
up branch; the predictors that some of them carry, to guess which neurons may be left out, are not used).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GATED, PLAIN = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """Where a decoder layer of a family has its FFN, and which fields of the configuration decide about it."""

    maps: tuple[str, ...] = GATED  # gate, up, down; or of a plain FFN: in, out
    holder: str = "mlp"  # the layer's module that has them; "": the layer itself
    act: str = "hidden_act"
    d_ff: str = "intermediate_size"
    up_relu: bool = False
    base: str = ""  # the family of transformers that it is, but for its FFN; "": one itself
    own_fields: frozenset[str] = frozenset()  # which that one does not have
    as_base: Callable[[dict[str, Any]], dict[str, Any]] = dict  # its configuration, as one of that family


def _llama_of(fields: dict[str, Any]) -> dict[str, Any]:
    width = fields.get("sparsity_new_intermediate_size") or fields.get("intermediate_size")
    return fields | {"hidden_act": "relu"} | ({} if width is None else {"intermediate_size": width})


SPARSITY = """
    baseline_run do_track end_warmup_step gated_mlp l0_cutoff l0_cutoff_period l1_coeff max_seq_len max_seq_length
    mlp_execution_logic new_intermediate_size per_device_train_batch_size reinitialize start_warmup_step
    tokens_until_dead train_batch_size use_hybrid_kernel
"""
FAMILIES = {  # by model_type
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "nemotron": Family(PLAIN),
    "opt": Family(("fc1", "fc2"), holder="", act="activation_function", d_ff="ffn_dim"),
    "llama_sparse_relu": Family(
        base="llama",
        own_fields=frozenset(f"sparsity_{name}" for name in SPARSITY.split()),
        as_base=_llama_of,
    ),
    "bamboo": Family(base="mistral", up_relu=True),
}
ACTIVATIONS = {"relu": "relu", "relu2": "relu2"}  # of configurations, as the FFN op calls them: those with zeros
