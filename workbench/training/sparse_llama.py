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

from twell.workbench.models.pretrained import TEACHER_SHARE
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


def continued(network: Model, activation: str, device: torch.device) -> Model:
    """Return a network that was read as `build` makes one, with an activation in the place of its own."""
    network.config._attn_implementation = "sdpa"
    network.config.hidden_act = activation
    for layer in network.model.layers:
        layer.mlp = PenalizedFFN(layer.mlp, activation)
    model: Any = network.to(device)  # type: ignore[arg-type]
    return model.train()  # type: ignore[no-any-return]


def as_transformers(model: Model, weights: dict[str, Tensor]) -> Model:
    """Return a model that `build` made as transformers has it, with other weights, by name, in their dtype."""
    with torch.device("meta"):
        copy: Model = type(model)(model.config)  # type: ignore[arg-type]
    copy.load_state_dict(weights, strict=False, assign=True)  # the tied one is there once
    copy.tie_weights()
    copy.config.dtype = next(iter(weights.values())).dtype
    return copy


def ffns(model: Model) -> list[PenalizedFFN]:
    """Return the FFNs of a model that `build` made, by layer."""
    return [layer.mlp for layer in model.model.layers]


class Layer(nn.Module):
    """A decoder layer of a model that `build` made, with what runs it.

    The function that runs it may be compiled, and hooks of this module stay outside of it.
    """

    def __init__(self, decoder: nn.Module, recompute: bool) -> None:
        super().__init__()
        self.decoder, self.recompute = decoder, recompute

    def forward(self, run: Callable[..., Any], *arguments: Any) -> Any:
        """Return run(decoder layer, *arguments)."""
        if self.recompute:
            return checkpoint(run, self.decoder, *arguments, use_reentrant=False)
        return run(self.decoder, *arguments)


class Objective(nn.Module):
    """The loss of a model that `build` made, as one module.

    Layers and head are called by themselves, without a mask (attention is causal, rows have no padding), so that each
    is one graph, and all layers share the code of one: a layer whose FFN becomes sparse costs one compilation.

    weights: a factor for each layer's share of the L1 term; default 1 each
    recompute: keep only each layer's input for the backward pass, and compute the rest again there
    compiled: by torch.compile, but for passes without gradients, whose rows vary in number; backend: of torch.compile
    teach: gives a teacher's logits of ids; with it, passes with gradients follow those too, at the same loss
    """

    weights: Tensor

    def __init__(
        self,
        model: Model,
        weights: Sequence[float] | None = None,
        recompute: bool = False,
        compiled: bool = False,
        backend: str = "inductor",
        teach: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        trunk: Any = model.model
        self.embedding, self.rotary, self.norm = trunk.embed_tokens, trunk.rotary_emb, trunk.norm
        self.unembedding = model.lm_head
        self.layers = nn.ModuleList(Layer(decoder, recompute) for decoder in trunk.layers)
        factors = [1.0] * len(trunk.layers) if weights is None else list(weights)
        self.register_buffer("weights", torch.tensor(factors, device=model.device), persistent=False)
        self._teach = teach
        loss = cross_entropy if teach is None else taught_cross_entropy
        self._compiled: tuple[Callable[..., Any], Callable[..., Tensor]] = run_layer, loss
        if compiled:
            given: dict[str, Any] = {"fullgraph": True, "dynamic": False, "backend": backend}
            self._compiled = torch.compile(run_layer, **given), torch.compile(loss, **given)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return cross-entropy (nats a token), L1 term, and firings int64 [layers, d_ff] of rows [n, seq_len + 1]."""
        learns = torch.is_grad_enabled()
        run, head = self._compiled if learns else (run_layer, cross_entropy)
        inputs, targets = rows[:, :-1], rows[:, 1:]
        terms, fires = [], []
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            hidden = self.embedding(inputs)
            positions = torch.arange(inputs.shape[1], device=rows.device)[None]
            rotary = self.rotary(hidden, position_ids=positions)
            for layer in self.layers:
                hidden, term, fired = layer(run, hidden, positions, rotary)
                terms.append(term)
                fires.append(fired)
            goal = () if self._teach is None or not learns else (self._teach(inputs),)
            loss = head(self.norm, self.unembedding, hidden, targets, *goal)
        return loss, (torch.stack(terms) * self.weights).mean(), torch.stack(fires)


def run_layer(layer: nn.Module, hidden: Tensor, positions: Tensor, rotary: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return a layer's output, and the L1 term and firings of its FFN."""
    hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    ffn: PenalizedFFN = layer.mlp  # type: ignore[assignment]
    return hidden, ffn.l1, ffn.fires


def cross_entropy(norm: nn.Module, unembedding: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the tokens that follow, in nats. hidden: of the last layer"""
    logits = unembedding(norm(hidden))
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def taught_cross_entropy(
    norm: nn.Module, unembedding: nn.Module, hidden: Tensor, targets: Tensor, goal: Tensor
) -> Tensor:
    """Return the mean cross-entropy of the tokens that follow, in nats, with the gradient of the whole objective.

    hidden: of the last layer; goal: the teacher's logits, of the same tokens
    """
    logits = unembedding(norm(hidden)).flatten(0, 1).float()
    loss = F.cross_entropy(logits, targets.flatten())
    ours, theirs = logits.log_softmax(-1), goal.flatten(0, 1).float().log_softmax(-1)
    divergence = F.kl_div(ours, theirs, log_target=True, reduction="batchmean")
    objective = (1 - TEACHER_SHARE) * loss + TEACHER_SHARE * divergence
    return objective + (loss - objective).detach()


@torch.no_grad()
def evaluate(objective: Objective, batches: Iterable[Tensor]) -> dict[str, Any]:
    """Return mean loss, nnz per layer, dead share per layer, and tokens, over batches of rows [n, seq_len + 1]."""
    device = objective.weights.device
    tokens, total = 0, torch.zeros((), dtype=torch.float64, device=device)
    fires = torch.zeros((), dtype=torch.int64, device=device)
    for rows in batches:
        loss, _, fired = objective(rows.to(device))
        count = rows.shape[0] * (rows.shape[1] - 1)
        tokens, total, fires = tokens + count, total + loss.double() * count, fires + fired
    return {
        "loss": float(total / tokens),
        "tokens": tokens,
        "nnz": (fires.sum(1) / tokens).tolist(),
        "dead": (fires == 0).double().mean(1).tolist(),
    }
