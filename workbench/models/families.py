"""The model families whose FFN the kernels run: every fact about a family stands here, and a new one is one entry.

Two of them ship with code of their own, which is never run. Their checkpoints are read as a family of transformers
with an FFN of ours: `llama_sparse_relu`, the checkpoints published with arXiv 2603.23198 (a Llama; the FFN is ReLU
whatever `hidden_act` says), and `bamboo`, those of Bamboo and TurboSparse (a Mistral with a ReLU on the gate and on the
up branch; the predictors that some of them carry, to guess which neurons may be left out, are not used).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from twell.workbench.run.manifest import LAYER_NORM, LAYER_NORM_PLUS_ONE, RMS_NORM

GATED, PLAIN = ("gate_proj", "up_proj", "down_proj"), ("up_proj", "down_proj")


@dataclass(frozen=True)
class Family:
    """Names in a family: of the FFN in a decoder layer, and of the configuration's fields that describe it."""

    maps: tuple[str, ...] = GATED  # names of the maps: gate, up, down; or of a plain FFN: in, out
    holder: str = "mlp"  # the layer's module that has them; "": the layer itself
    act: str = "hidden_act"  # the configuration's field with the activation
    d_ff: str = "intermediate_size"  # the configuration's field with the FFN's width
    norm: str = RMS_NORM  # the norm before the head, as the manifest calls it
    up_relu: bool = False  # whether the up branch has a ReLU too
    base: str = ""  # the family of transformers that runs it, with an FFN of ours; "": it is one itself
    own_fields: frozenset[str] = frozenset()  # configuration fields that `base` does not have
    as_base: Callable[[dict[str, Any]], dict[str, Any]] = dict  # turns its configuration into one of `base`


def _llama_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a llama_sparse_relu as that of a Llama."""
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
    "nemotron": Family(PLAIN, norm=LAYER_NORM_PLUS_ONE),
    "opt": Family(("fc1", "fc2"), holder="", act="activation_function", d_ff="ffn_dim", norm=LAYER_NORM),
    "llama_sparse_relu": Family(
        base="llama",
        own_fields=frozenset(f"sparsity_{name}" for name in SPARSITY.split()),
        as_base=_llama_of,
    ),
    "bamboo": Family(base="mistral", up_relu=True),
}
ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu2",
}  # the activations that have zeros: their name in configurations, and in the FFN op
