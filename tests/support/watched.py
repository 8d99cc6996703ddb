"""An independent count of what a model's FFNs fire, by hooks of PyTorch, to hold a watch against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from twell.workbench.run.schema import nnz_columns

PAD = 2  # a quotation mark, which none of the sentences has and `generate` is kept from
SENTENCES = (
    "The harbour lay quiet in the morning, and nobody couldn't hear the gulls.",
    "Ten metres.",
    "Formaldehyde, CH₂O, is a gas.",
)


def first_map(layer: Any) -> torch.nn.Linear:
    """Return the map of a decoder layer whose output decides what fires."""
    holder = getattr(layer, "mlp", layer)
    return next(getattr(holder, name) for name in ("gate_proj", "fc1", "up_proj") if hasattr(holder, name))


class Hooked:
    """Rows of (token id, nnz of each layer), in the order that the model ran them; None for rows that are padding."""

    def __init__(self) -> None:
        self.passes: list[np.ndarray] = []

    def rows(self, skip: int | None = None) -> list[tuple[int, ...]]:
        """Return the rows, sorted. skip: the id of padding, which the model reads and no count has"""
        every = np.concatenate(self.passes) if self.passes else np.zeros((0, 1), np.int64)
        return sorted(map(tuple, (every if skip is None else every[every[:, 0] != skip]).tolist()))


@contextmanager
def by_hooks(model: Any) -> Iterator[Hooked]:
    """Count gate pre-activations above 0 with plain hooks, while the model runs in this context."""
    hooked, ids, counts = Hooked(), [], []
    body = model.get_decoder()

    def begin(_m: Any, args: Any, keywords: Any) -> None:
        given = keywords.get("input_ids")
        ids.append((args[0] if given is None else given).reshape(-1))
        counts.clear()

    def end(*_: Any) -> None:
        hooked.passes.append(torch.stack([ids[-1], *counts], 1).numpy())

    def count(_m: Any, _x: Any, gate: torch.Tensor) -> None:
        counts.append((gate.detach() > 0).sum(-1).reshape(-1))

    removes = [body.register_forward_pre_hook(begin, with_kwargs=True), body.register_forward_hook(end)]
    removes += [first_map(layer).register_forward_hook(count) for layer in body.layers]
    try:
        yield hooked
    finally:
        for handle in removes:
            handle.remove()


def rows_of(w: Any) -> list[tuple[int, ...]]:
    """Return a watch's rows as `Hooked.rows` has them."""
    table = w.table()
    return sorted(map(tuple, table[["token_id", *nnz_columns(w.loaded.layers)]].to_numpy().astype(np.int64).tolist()))


def state_of(model: torch.nn.Module) -> list[Any]:
    """Return what must be as it was after a watch: each module's own attributes, each parameter's object, storage,
    order and bits."""
    weights = [
        (name, id(p), p.data_ptr(), p.stride(), p.requires_grad, p.detach().clone())
        for name, p in model.named_parameters()
    ]
    modules = [
        (name, id(m), type(m), m.training, sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
        for name, m in model.named_modules()
    ]
    return [weights, modules]


def same_state(before: list[Any], after: list[Any]) -> bool:
    """Return whether two states are one, to the bit."""
    equal = [
        one[:-1] == two[:-1] and torch.equal(one[-1], two[-1]) for one, two in zip(before[0], after[0], strict=True)
    ]
    return all(equal) and before[1] == after[1]
