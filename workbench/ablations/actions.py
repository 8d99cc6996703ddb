"""Actions on hidden values: what a condition does to a layer, cheap beside the products of its FFN.

Silenced neurons cost a product of the map back's weight and a mask, a threshold one pass over the hidden values, and so
do the strongest of each token on a GPU (`kernels/strongest.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import hardshrink

from twell.kernels.strongest import strongest


@dataclass(frozen=True, eq=False)
class Silence:
    """Neurons at 0. keep: bool [d_ff], numpy; None: no neuron is kept."""

    keep: NDArray | None


@dataclass(frozen=True)
class Shrink:
    """Values |hidden| up to a threshold at 0."""

    threshold: float


@dataclass(frozen=True)
class Strongest:
    """The strongest share of each token's firings, by |hidden|; the rest at 0. threshold: firing is |hidden| > it"""

    share: float
    threshold: float = 0.0


@dataclass(frozen=True)
class Scatter:
    """A random share of each token's firings at 0."""

    share: float
    seed: int


Action = Silence | Shrink | Strongest | Scatter


def apply(action: Shrink | Strongest | Scatter, hidden: Tensor, batch: int = 0) -> Tensor:
    """Return hidden [..., d_ff] with an action done to it. batch: its number, which moves the generator on."""
    if isinstance(action, Shrink):
        return hardshrink(hidden, action.threshold)
    if isinstance(action, Scatter):
        generator = torch.Generator(hidden.device).manual_seed(action.seed * 1_000_003 + batch)
        return hidden.masked_fill(torch.rand(hidden.shape, generator=generator, device=hidden.device) < action.share, 0)
    return strongest(hidden, action.share, action.threshold)
