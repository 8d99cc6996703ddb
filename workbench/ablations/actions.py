"""Actions on hidden values: what a condition does to a layer, cheap beside the products of its FFN.

Silenced neurons cost a product of the map back's weight and a mask, a threshold one pass over the hidden values. The
strongest of each token are found by bisecting the bits of |hidden|, whose order is that of the values: one comparison
and one count a bit, and no sort.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import hardshrink

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


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
        return hidden * (torch.rand(hidden.shape, generator=generator, device=hidden.device) >= action.share)
    size = hidden.abs()
    count = (size > action.threshold).sum(-1, keepdim=True)
    least = kth_largest(size, torch.ceil(action.share * count).long())
    return hidden * (size >= least)


def kth_largest(size: Tensor, k: Tensor) -> Tensor:
    """Return the k-th largest of each row of values from 0 up, [..., 1]; where k is 0, more than any of them.

    size [..., n]: no NaN; k: int64 [..., 1]
    """
    if size.dtype not in BITS or size.device.type == "cpu":
        most = max(1, int(k.max()))
        values = size.topk(most, dim=-1).values
        return values.gather(-1, (k - 1).clamp(min=0)).masked_fill(k == 0, torch.inf)
    kind = BITS[size.dtype]
    bits = size.view(kind)
    least = torch.zeros_like(k, dtype=kind)  # the greatest pattern that at least k values reach
    for bit in reversed(range(torch.iinfo(kind).bits - 1)):
        higher = least | (1 << bit)
        least = torch.where((bits >= higher).sum(-1, keepdim=True) >= k, higher, least)
    return torch.where(k > 0, least, torch.iinfo(kind).max).view(size.dtype)
