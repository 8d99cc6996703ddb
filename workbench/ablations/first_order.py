"""Estimate what silencing each neuron would do to the loss, all of them at once.

The idea: to first order the loss changes by -g·h when a hidden value h goes to 0, with g its gradient. Summed over
tokens, that is an estimate for each neuron, from one forward and one backward pass. Gradients are those of hidden
values alone: weights have none, so the backward pass is two of a forward pass's products, not four.

Cost: three to four forward passes, and every layer's hidden values in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from twell.workbench.ablations.passes import at_least_float32
from twell.workbench.capturing.forward import LOGITS, Inputs
from twell.workbench.models.own_code import OwnModel
from twell.workbench.models.slots.cover import Cover
from twell.workbench.text.batches import Batch


def first_order(
    own: OwnModel, batches: Iterable[Batch], done: Callable[[], object] = lambda: None
) -> tuple[NDArray, int]:
    """Return the estimated change of the loss in nats, summed over tokens [layers, d_ff], and how many tokens.

    done: called after each batch
    """
    change = torch.zeros((own.layers, own.d_ff), dtype=torch.float64, device=own.device)
    tokens = 0
    trained = [parameter.requires_grad for parameter in own.model.parameters()]
    own.model.requires_grad_(False)
    cover = Cover()
    try:
        _start_graph(own, cover)
        for layer, down in enumerate(own.downs):
            _add_change(cover, down, change[layer])
        for batch in batches:
            inputs = Inputs.of(batch, own.device)
            with torch.enable_grad():
                _backward(own, inputs)
            tokens += len(inputs.predicts)
            done()
    finally:
        cover.remove()
        for parameter, before in zip(own.model.parameters(), trained, strict=True):
            parameter.requires_grad_(before)
    return change.cpu().numpy(), tokens


def _start_graph(own: OwnModel, cover: Cover) -> None:
    """Have gradients flow from the embeddings on, whose weights have none."""

    def forward(ids: Tensor) -> Tensor:
        states: Tensor = beneath(ids)
        return states.detach().requires_grad_()

    beneath = cover.put(own.model.get_input_embeddings(), forward)


def _add_change(cover: Cover, down: nn.Module, change: Tensor) -> None:
    """Add to `change` [d_ff] what each neuron of a layer contributes, once its gradient is known."""

    def forward(hidden: Tensor) -> Any:
        values = hidden.detach()

        def add(gradient: Tensor) -> None:
            products = (gradient * values).reshape(-1, values.shape[-1])
            change.sub_(products.sum(0, dtype=at_least_float32(products[:0]).dtype))

        hidden.register_hook(add)
        return beneath(hidden)

    beneath = cover.put(down, forward)


def _backward(own: OwnModel, inputs: Inputs) -> None:
    """Run a batch forward and backward, from the sum of its losses."""
    ids = inputs.ids.view(-1, inputs.longest)
    hidden = own.body(input_ids=ids, use_cache=False).last_hidden_state
    flat = hidden.detach().flatten(0, 1).requires_grad_()
    targets, head = inputs.ids.long(), own.head
    for rows in inputs.predicts.long().split(max(1, LOGITS[flat.device.type] // head.weight.shape[0])):
        loss = cross_entropy(at_least_float32(head(flat[rows])), targets[rows + 1], reduction="sum")
        loss.backward()  # a chunk of logits at a time
    assert flat.grad is not None
    hidden.backward(flat.grad.view_as(hidden))


def chosen_neurons(change: NDArray, fires: NDArray | None, count: int, seed: int) -> dict[int, tuple[int, ...]]:
    """Return neurons to measure exactly, by layer: half those of the greatest estimates, half at random of the rest.

    change [layers, d_ff]: estimates; fires: firings of each neuron, None if unknown; count: neurons in all. Of neurons
    that fire, where any does: below a threshold others have values too.
    """
    living = np.flatnonzero((change if fires is None or not fires.any() else fires).ravel() != 0)
    order = living[np.argsort(-np.abs(change.ravel()[living]), kind="stable")]
    top, rest = order[: -(-count // 2)], order[-(-count // 2) :]
    drawn = np.random.default_rng(seed).choice(rest, min(len(rest), count // 2), replace=False)
    by_layer: dict[int, list[int]] = {}
    for index in sorted([*top.tolist(), *drawn.tolist()]):
        by_layer.setdefault(index // change.shape[1], []).append(index % change.shape[1])
    return {layer: tuple(neurons) for layer, neurons in by_layer.items()}
