"""Run a model with its dense or with its sparse FFNs, each as its users have it.

The dense side has linear modules, one after the other, as transformers has them: their calls are part of what a step
costs the host. Cost: a copy of w_down where a kernel holds it by neuron.

    sides = Sides(loaded)
    with sides.of(DENSE):
        model(**batch)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from twell.kernels.backends.reference import ACTIVATION
from twell.kernels.calls import compiling
from twell.kernels.modules import SparseFFN
from twell.workbench.models.load import LoadedModel

DENSE, SPARSE = "dense", "sparse"


class LinearFFN(nn.Module):
    """An FFN of linear modules, as transformers has it, on the weights of a SparseFFN.

    w_down is copied if the other holds it by neuron.
    """

    def __init__(self, ffn: SparseFFN) -> None:
        super().__init__()
        self.gate = _linear(ffn.w_gate, ffn.b_gate)
        self.up = None if ffn.w_up is None else _linear(ffn.w_up, ffn.b_up)
        self.down = _linear(ffn.w_down.contiguous(), ffn.b_down)
        self.activation = nn.ReLU() if ffn.activation == "relu" else None
        self._function, self._up_relu = ACTIVATION[ffn.activation], ffn.up_relu

    def forward(self, x: Tensor) -> Tensor:
        """Return y [..., d_model]."""
        gate = self.gate(x)
        hidden = self._function(gate) if self.activation is None else self.activation(gate)
        if self.up is not None:
            up = self.up(x)
            hidden = hidden * (up.relu() if self._up_relu else up)
        return self.down(hidden)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear


class Sides:
    """A model that runs with its dense or its sparse FFNs."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._holders = [
            (block, next(name for name, child in block.named_children() if child is ffn), ffn, LinearFFN(ffn))
            for block, ffn in zip(loaded.blocks, loaded.ffns, strict=True)
        ]

    @contextmanager
    def of(self, side: str) -> Iterator[None]:
        """Run every layer with the FFN of a side, DENSE or SPARSE; afterwards with the sparse one again."""
        for block, name, sparse, dense in self._holders:
            setattr(block, name, sparse if side == SPARSE else dense)
        try:
            yield
        finally:
            for block, name, sparse, _ in self._holders:
                setattr(block, name, sparse)


def compiled_layer(block: nn.Module) -> Callable[..., Tensor]:
    """Return a decoder layer compiled as both sides are: by the backend that lets an FFN's kernel add the residual."""
    compiled: Callable[..., Tensor] = torch.compile(block, dynamic=False, fullgraph=True, backend=compiling.twell)
    return compiled
