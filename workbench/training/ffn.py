"""The FFN that a training runs, dense by torch or by the sparse kernels, with the L1 term and firings of each call.

Dense and sparse compute the same; only their speed differs. A layer fires half of its neurons at first, where dense
products are faster, and few later on. `SparseLayers` decides from the counts of the steps before, which are at hand
when a row of the log is made, so that deciding costs no synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from twell.kernels.dispatch import Choice
from twell.kernels.training import (
    Trained,
    capacity_for,
    choose,
    sparse_pays,
    train_gated_ffn,
    train_plain_ffn,
)
from twell.workbench.errors import UserError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


class PenalizedFFN(nn.Module):
    """A decoder layer's FFN that also keeps, of its last forward pass, the mean sum |h| and the firings per neuron.

    mlp: the FFN of a Llama (gated) or Nemotron (plain) layer, whose projections keep their names
    activation: relu | relu2 | silu. A neuron fires where its pre-activation is above 0, whatever the activation
    sparse: whether the next call runs by the sparse kernels; capacity: of that call, as `train_gated_ffn` takes it
    """

    l1: Tensor
    fires: Tensor
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __init__(self, mlp: Any, activation: str = "relu") -> None:
        super().__init__()
        self.gated = hasattr(mlp, "gate_proj")
        if self.gated:
            self.gate_proj = mlp.gate_proj
        self.up_proj, self.down_proj = mlp.up_proj, mlp.down_proj
        self.activation, self.sparse = activation, False
        self.capacity: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[rows, seq_len, d_model] -> the same; `l1` is a scalar, `fires` int64 [d_ff]."""
        if self.sparse:
            trained = self._by_kernels(x)
            self.l1, self.fires = trained.l1, trained.fires
            return trained.y
        first = self.gate_proj(x) if self.gated else self.up_proj(x)
        hidden = ACTIVATIONS[self.activation](first)
        if self.gated:
            hidden = hidden * self.up_proj(x)
        self.l1 = hidden.abs().sum(dtype=torch.float32) / (x.shape[0] * x.shape[1])
        self.fires = (first > 0).sum(dim=(0, 1))
        return self.down_proj(hidden)

    def _by_kernels(self, x: Tensor) -> Trained:
        up, down, activation = self.up_proj.weight, self.down_proj.weight, self.activation
        if self.gated:
            gate = self.gate_proj.weight
            return train_gated_ffn(x, gate, up, down, activation=activation, capacity=self.capacity)
        return train_plain_ffn(x, up, down, activation=activation, capacity=self.capacity)


class SparseLayers:
    """Which layers of a model run by the sparse kernels.

    ffns: of the layers, in order; mode: auto (where it pays), dense (nowhere) or sparse (everywhere, from the start)
    rows: tokens of a call
    Raises UserError for sparse kernels of an activation without zeros.
    """

    def __init__(self, ffns: Sequence[PenalizedFFN], mode: str, device: torch.device, rows: int) -> None:
        self.ffns, self.mode = list(ffns), mode
        self.choice = self._choose(device, rows)
        if mode == "sparse":
            self._set([True] * len(self.ffns))

    def _choose(self, device: torch.device, rows: int) -> Choice:
        """Return the kernel that sparse layers would run by, or `dense`, with the reason."""
        if self.mode == "dense":
            return Choice("dense", "requested by --kernel dense")
        ffn = self.ffns[0]
        if ffn.activation == "silu":
            if self.mode == "sparse":
                raise UserError("Expected --kernel auto or dense with SiLU, which has no zeros to skip, got sparse.")
            return Choice("dense", "SiLU has no zeros to skip")
        d_ff, d_model = ffn.up_proj.weight.shape
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        choice = choose(device, dtype, d_model, d_ff, rows, gated=ffn.gated, activation=ffn.activation)
        if self.mode == "auto" and choice.kernel == "reference":
            return Choice("dense", f"no sparse kernel has a backward pass for this training ({choice.reason})")
        return choice

    @property
    def count(self) -> int:
        """The number of layers that run by the sparse kernels."""
        return sum(ffn.sparse for ffn in self.ffns)

    def update(self, nnz: Sequence[float]) -> bool:
        """Decide anew for every layer, in mode auto; return whether any changed. nnz: mean of each layer, of late.

        The memory that sparse layers keep follows nnz in every mode.
        """
        if self.choice.kernel == "dense":
            return False
        d_ff = self.ffns[0].up_proj.weight.shape[0]
        for ffn, mean in zip(self.ffns, nnz, strict=True):
            ffn.capacity = capacity_for(mean, d_ff)
        if self.mode != "auto":
            return False
        pays = [sparse_pays(mean, d_ff) for mean in nnz]
        changed = pays != [ffn.sparse for ffn in self.ffns]
        self._set(pays)
        return changed

    @contextmanager
    def all_dense(self) -> Iterator[None]:
        """Run every layer densely inside this context, to time it beside the sparse one."""
        before = [ffn.sparse for ffn in self.ffns]
        self._set([False] * len(self.ffns))
        try:
            yield
        finally:
            self._set(before)

    def _set(self, sparse: Sequence[bool]) -> None:
        for ffn, one in zip(self.ffns, sparse, strict=True):
            ffn.sparse = one
