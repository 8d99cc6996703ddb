"""Build the model that is trained, and compute the loss that makes it sparse.

With h = act(gate) * up, or h = act(up) in a plain FFN, the loss of a step is

    cross-entropy + l1 * mean over layers (weight of the layer * mean over tokens (sum |h|))

Cost: the penalty and the counts are two reductions over tensors that the step has at hand, little beside its products.

    loss, l1, fires = Objective(build(recipe, mark=0, device=torch.device("cpu")))(rows)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, NemotronConfig, NemotronForCausalLM

from twell.workbench.training.ffn import PenalizedFFN
from twell.workbench.training.recipes import Recipe

Model = LlamaForCausalLM | NemotronForCausalLM


def build(recipe: Recipe, mark: int, device: torch.device) -> Model:
    """Return a model with fresh float32 weights and PenalizedFFN as its FFNs: a Llama, or a Nemotron for plain ones.

    Its parameters keep their names, so plain transformers loads what is saved. mark: the id that opens a text
    """
    shape: dict[str, Any] = {
        "vocab_size": recipe.vocab,
        "hidden_size": recipe.d_model,
        "intermediate_size": recipe.d_ff,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.d_model // recipe.head_size,
        "num_key_value_heads": recipe.kv_heads,
        "head_dim": recipe.head_size,
        "hidden_act": recipe.activation,
        "max_position_embeddings": recipe.seq_len,
        "tie_word_embeddings": True,
        "bos_token_id": mark,
        "eos_token_id": mark,
    }
    kinds: tuple[Any, Any] = (LlamaConfig, LlamaForCausalLM) if recipe.gated else (NemotronConfig, NemotronForCausalLM)
    config = kinds[0](**shape)
    config._attn_implementation = "sdpa"
    torch.manual_seed(recipe.seed)  # the only draw of torch's own generator
    with device:
        model: Model = kinds[1](config).float()
    for layer in model.model.layers:
        layer.mlp = PenalizedFFN(layer.mlp, recipe.activation)
    return model.train()


def ffns(model: Model) -> list[PenalizedFFN]:
    """Return the FFNs of a model that `build` made, by layer."""
    return [layer.mlp for layer in model.model.layers]


class Objective(nn.Module):
    """The loss of a model that `build` made, as one module.

    Layers and head are called by themselves, without a mask (attention is causal, rows have no padding), so that each
    is one graph, and all layers share the code of one: a layer whose FFN becomes sparse costs one compilation.

    weights: a factor for each layer's share of the L1 term; default 1 each
    recompute: keep only each layer's input for the backward pass, and compute the rest again there
    compiled: by torch.compile; backend: of torch.compile
    """

    def __init__(
        self,
        model: Model,
        weights: Sequence[float] | None = None,
        recompute: bool = False,
        compiled: bool = False,
        backend: str = "inductor",
    ) -> None:
        super().__init__()
        self.weights: Tensor
        self.model, self.recompute = model, recompute
        factors = [1.0] * len(model.model.layers) if weights is None else list(weights)
        self.register_buffer("weights", torch.tensor(factors, device=model.device), persistent=False)
        self._layer: Callable[..., Any] = run_layer
        self._head: Callable[..., Tensor] = cross_entropy
        if compiled:
            self._layer = torch.compile(run_layer, fullgraph=True, dynamic=False, backend=backend)
            self._head = torch.compile(cross_entropy, fullgraph=True, dynamic=False, backend=backend)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return cross-entropy (nats a token), L1 term, and firings int64 [layers, d_ff] of rows [n, seq_len + 1]."""
        inputs, targets = rows[:, :-1], rows[:, 1:]
        trunk = self.model.model
        terms, fires = [], []
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            hidden = trunk.embed_tokens(inputs)
            positions = torch.arange(inputs.shape[1], device=rows.device)[None]
            rotary = trunk.rotary_emb(hidden, position_ids=positions)
            for layer in trunk.layers:
                arguments = (layer, hidden, positions, rotary)
                if self.recompute:
                    hidden, term, fired = checkpoint(self._layer, *arguments, use_reentrant=False)
                else:
                    hidden, term, fired = self._layer(*arguments)
                terms.append(term)
                fires.append(fired)
            loss = self._head(self.model, hidden, targets)
        return loss, (torch.stack(terms) * self.weights).mean(), torch.stack(fires)


def run_layer(layer: nn.Module, hidden: Tensor, positions: Tensor, rotary: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer's output, and the L1 term and firings of its FFN."""
    hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    ffn: PenalizedFFN = layer.mlp  # type: ignore[assignment]
    return hidden, ffn.l1, ffn.fires


def cross_entropy(model: Model, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the tokens that follow, in nats. hidden: of the last layer"""
    logits = model.lm_head(model.model.norm(hidden))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def evaluate(model: Model, batches: Iterable[Tensor]) -> dict[str, Any]:
    """Return mean loss, nnz per layer, dead share per layer, and tokens, over batches of rows [n, seq_len + 1]."""
    objective = Objective(model)
    tokens, total = 0, torch.zeros((), dtype=torch.float64, device=model.device)
    fires = torch.zeros((), dtype=torch.int64, device=model.device)
    for rows in batches:
        loss, _, fired = objective(rows.to(model.device))
        count = rows.shape[0] * (rows.shape[1] - 1)
        tokens, total, fires = tokens + count, total + loss.double() * count, fires + fired
    return {
        "loss": float(total / tokens),
        "tokens": tokens,
        "nnz": (fires.sum(1) / tokens).tolist(),
        "dead": (fires == 0).double().mean(1).tolist(),
    }
