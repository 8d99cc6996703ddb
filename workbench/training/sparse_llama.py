"""What is trained and what on: a Llama with a ReLU gate, and the loss that makes it sparse.

With h = relu(gate) * up, the loss of a step is

    cross-entropy + l1 * mean over layers (mean over tokens (sum |h|))

Cost: the penalty and the counts are two reductions over tensors that the step has at hand, little beside its products.

    loss, l1, fires = forward(build(recipe, mark=0, device=torch.device("cpu")), rows)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from twell.workbench.training.recipes import Recipe


class PenalizedFFN(nn.Module):
    """A Llama layer's FFN that also keeps, of its last forward pass, the mean sum |h| and the firings per neuron."""

    l1: Tensor
    fires: Tensor

    def __init__(self, mlp: LlamaMLP) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: Tensor) -> Tensor:
        """[rows, seq_len, d_model] -> the same; `l1` is a scalar, `fires` int64 [d_ff]."""
        gate = F.relu(self.gate_proj(x))
        hidden = gate * self.up_proj(x)
        self.l1 = hidden.abs().sum(dtype=torch.float32) / (x.shape[0] * x.shape[1])
        self.fires = (gate > 0).sum(dim=(0, 1))
        return self.down_proj(hidden)


def build(recipe: Recipe, mark: int, device: torch.device) -> LlamaForCausalLM:
    """The model with fresh float32 weights, and PenalizedFFN in place of its FFNs; its parameters keep their names."""
    config = LlamaConfig(
        vocab_size=recipe.vocab,
        hidden_size=recipe.d_model,
        intermediate_size=recipe.d_ff,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.d_model // recipe.head_size,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_size,
        hidden_act="relu",
        max_position_embeddings=recipe.seq_len,
        tie_word_embeddings=True,
        bos_token_id=mark,
        eos_token_id=mark,
    )
    config._attn_implementation = "sdpa"
    torch.manual_seed(recipe.seed)  # the only draw of torch's generator: nothing after it is random
    with device:
        model = LlamaForCausalLM(config).float()
    for layer in model.model.layers:
        layer.mlp = PenalizedFFN(layer.mlp)
    return model.train()


def forward(model: LlamaForCausalLM, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy (nats a token), L1 term, and firings int64 [layers, d_ff] of rows [n, seq_len + 1].

    The layers are called one by one, without a mask (attention is causal, rows have no padding), so that the whole
    compiles to one graph.
    """
    inputs, targets = rows[:, :-1], rows[:, 1:]
    llama = model.model
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
        hidden = llama.embed_tokens(inputs)
        positions = torch.arange(inputs.shape[1], device=rows.device)[None]
        rotary = llama.rotary_emb(hidden, position_ids=positions)
        for layer in llama.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        logits = model.lm_head(llama.norm(hidden))
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
    l1 = torch.stack([layer.mlp.l1 for layer in llama.layers]).mean()
    return loss, l1, torch.stack([layer.mlp.fires for layer in llama.layers])


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, batches: Iterable[Tensor]) -> dict[str, Any]:
    """Mean loss, nnz per layer, dead share per layer, and tokens, over batches of rows [n, seq_len + 1]."""
    tokens, total = 0, torch.zeros((), dtype=torch.float64, device=model.device)
    fires = torch.zeros((), dtype=torch.int64, device=model.device)
    for rows in batches:
        loss, _, fired = forward(model, rows.to(model.device))
        here = rows.shape[0] * (rows.shape[1] - 1)
        tokens, total, fires = tokens + here, total + loss.double() * here, fires + fired
    return {
        "loss": float(total / tokens),
        "tokens": tokens,
        "nnz": (fires.sum(1) / tokens).tolist(),
        "dead": (fires == 0).double().mean(1).tolist(),
    }
