"""Actions on hidden values: what a condition does to a layer, cheap beside the products of its FFN.

Silenced neurons cost a product of the map back's weight and a mask, a threshold one pass over the hidden values. The
strongest of each token are found on a GPU by one sort of all firings of a batch where few fire, and where many do by
bisecting the bits of |hidden|: one comparison and one count a bit. Bits of values that are not below 0 are in the order
of the values. Values that are equal to the least one kept are kept too, whichever way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import hardshrink

FEW = 1 / 8  # share of values that fire, up to which they are sorted
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
        return hidden.masked_fill(torch.rand(hidden.shape, generator=generator, device=hidden.device) < action.share, 0)
    return strongest(hidden, action.share, action.threshold)


def strongest(hidden: Tensor, share: float, threshold: float) -> Tensor:
    """Return hidden [..., d_ff], no NaN, with the strongest share of each row's firings, |hidden| > threshold, left."""
    if hidden.device.type == "cpu" or hidden.dtype not in BITS:
        return by_topk(hidden, share, threshold)
    values = hidden.flatten()
    places = (values.abs() > threshold if threshold else values).nonzero()[:, 0]
    few = len(places) <= FEW * len(values)
    return by_sort(hidden, share, places) if few else by_bits(hidden, share, threshold)


def by_topk(hidden: Tensor, share: float, threshold: float) -> Tensor:
    """Do what `strongest` does by the greatest of each row."""
    size = hidden.abs()
    k = kept(share, (size > threshold).sum(-1, keepdim=True))
    values = size.topk(max(1, int(k.max())), dim=-1).values
    least = values.gather(-1, (k - 1).clamp(min=0)).masked_fill(k == 0, torch.inf)
    return hidden.masked_fill(size < least, 0)


def by_sort(hidden: Tensor, share: float, places: Tensor) -> Tensor:
    """Do what `strongest` does by sorting what fired, all rows at once, by row and then the greatest first.

    places: int64 [firings], where in hidden, flattened, ascending
    """
    left = torch.zeros_like(hidden).flatten()
    if not len(places):
        return left.view_as(hidden)
    kind, rows = BITS[hidden.dtype], hidden.numel() // hidden.shape[-1]
    most = torch.iinfo(kind).max
    wide = torch.int32 if kind is torch.int16 and rows <= 2**16 else torch.int64  # 15 bits of a value, 16 of a row
    row, fired = places // hidden.shape[-1], hidden.flatten()[places]
    size = fired.abs()
    key = row.to(wide) * (most + 1) + (most - size.view(kind)).to(wide)
    starts = torch.searchsorted(row, torch.arange(rows + 1, device=row.device))
    last = (starts[:-1] + kept(share, starts.diff()) - 1).clamp(0, len(key) - 1)
    least = (most - key.sort().values[last] % (most + 1)).to(kind).view(hidden.dtype)
    return left.scatter_(0, places, fired.masked_fill(size < least[row], 0)).view_as(hidden)


def by_bits(hidden: Tensor, share: float, threshold: float) -> Tensor:
    """Do what `strongest` does by finding the greatest bit pattern that enough values reach, bit by bit."""
    kind, size = BITS[hidden.dtype], hidden.abs()
    k = kept(share, (size > threshold).sum(-1, keepdim=True))
    bits, least = size.view(kind), torch.zeros_like(k, dtype=kind)
    for bit in reversed(range(torch.iinfo(kind).bits - 1)):
        higher = least | (1 << bit)
        least = torch.where((bits >= higher).sum(-1, keepdim=True) >= k, higher, least)
    return hidden.masked_fill((bits < least) | (k == 0), 0)


def kept(share: float, firings: Tensor) -> Tensor:
    """Return how many of each row's firings a share of them is, int64, rounded up."""
    return torch.ceil(share * firings).long()
