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
    size = hidden.abs()
    fired = size > action.threshold
    k = torch.ceil(action.share * fired.sum(-1, keepdim=True)).long()
    return hidden.masked_fill(size < kth_largest(size, fired, k), 0)


def kth_largest(size: Tensor, fired: Tensor, k: Tensor) -> Tensor:
    """Return the k-th largest of each row's values that fired, [..., 1]; where k is 0, more than any of them.

    size [..., n]: no NaN; fired: bool [..., n]; k: int64 [..., 1], at most the row's number of firings
    """
    if size.device.type == "cpu" or size.dtype not in BITS:
        return by_topk(size, k)
    places = fired.flatten().nonzero()[:, 0]
    return by_sort(size, places, k) if len(places) <= FEW * fired.numel() else by_bits(size, k)


def by_topk(size: Tensor, k: Tensor) -> Tensor:
    """Do what `kth_largest` does by the greatest of each row."""
    values = size.topk(max(1, int(k.max())), dim=-1).values
    return values.gather(-1, (k - 1).clamp(min=0)).masked_fill(k == 0, torch.inf)


def by_sort(size: Tensor, places: Tensor, k: Tensor) -> Tensor:
    """Do what `kth_largest` does by sorting what fired, all rows at once, by row and then the greatest first.

    places: int64 [firings], where in size, flattened
    """
    if not len(places):
        return torch.full_like(k, torch.inf, dtype=size.dtype)
    kind = BITS[size.dtype]
    most, rows = torch.iinfo(kind).max, k.numel()
    wide = torch.int32 if kind is torch.int16 and rows <= 2**16 else torch.int64  # 15 bits of a value, 16 of a row
    row = places // size.shape[-1]
    key = row.to(wide) * (most + 1) + (most - size.flatten().view(kind)[places]).to(wide)
    before = torch.searchsorted(row, torch.arange(rows, device=row.device)).view_as(k)
    kth = key.sort().values[(before + k - 1).clamp(0, len(key) - 1)]
    return (most - kth % (most + 1)).to(kind).view(size.dtype).masked_fill(k == 0, torch.inf)


def by_bits(size: Tensor, k: Tensor) -> Tensor:
    """Do what `kth_largest` does by finding the greatest bit pattern that at least k values reach, bit by bit."""
    kind = BITS[size.dtype]
    bits, least = size.view(kind), torch.zeros_like(k, dtype=kind)
    for bit in reversed(range(torch.iinfo(kind).bits - 1)):
        higher = least | (1 << bit)
        least = torch.where((bits >= higher).sum(-1, keepdim=True) >= k, higher, least)
    return torch.where(k > 0, least, torch.iinfo(kind).max).view(size.dtype)
