"""Leave the strongest share of what fires in each row of hidden values; all else is 0.

Strong is a great |hidden|. Values that are equal to the least one that stays stay too. On a GPU one kernel reads and
writes each row once. Elsewhere `topk` finds the least one of each row, or, of values for which that kernel cannot be
built, a bisection of the bits of |hidden|, which are in the order of the values: a comparison and a count for each bit.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from twell.kernels import build
from twell.kernels.build import Library, Source

BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
MOST_COLUMNS = 2**14  # of a row that lies in shared memory


@cache
def library(capability: tuple[int, int]) -> Library:
    """Return the library for GPUs of this compute capability, (major, minor)."""
    arch = "-gencode=arch=compute_{0}{1},code=sm_{0}{1}".format(*capability)
    sources = (Source("strongest/strongest.cu", (arch,)), Source("strongest/bindings.cpp"))
    return Library("strongest", sources, headers=("common/*", "strongest/*"), seconds=8, cuda=True)


def strongest(hidden: Tensor, share: float, threshold: float = 0.0) -> Tensor:
    """Return hidden [..., d_ff], no NaN, with the strongest share of each row's firings, rounded up, and 0 elsewhere.

    threshold: firing is |hidden| > it
    """
    if hidden.device.type == "cpu" or hidden.dtype not in BITS:
        return by_topk(hidden, share, threshold)
    return (by_kernel if takes(hidden) else by_bits)(hidden, share, threshold)


def takes(hidden: Tensor) -> bool:
    """Return whether `by_kernel` can take these values. Compiles the library to find out, once a process."""
    columns = hidden.shape[-1]
    if hidden.device.type != "cuda" or hidden.dtype.itemsize != 2 or columns % 8 or not 0 < columns <= MOST_COLUMNS:
        return False
    capability = torch.cuda.get_device_capability(hidden.device)
    return capability >= (8, 0) and build.failure(library(capability)) is None


def by_kernel(hidden: Tensor, share: float, threshold: float) -> Tensor:
    """Do what `strongest` does in one launch."""
    rows = hidden.reshape(-1, hidden.shape[-1]).contiguous()
    rows = rows if rows.data_ptr() % 16 == 0 else rows.clone()
    left = torch.empty_like(rows)
    torch.ops.twell.strongest(rows, left, share, bits_of(threshold, hidden.dtype))
    return left.view(hidden.shape)


def bits_of(threshold: float, dtype: torch.dtype) -> int:
    """Return the bits of a threshold from 0 on, rounded to a type as torch does where it compares values with it."""
    return int(torch.tensor(threshold, dtype=torch.float64).to(dtype).view(BITS[dtype]))


def by_topk(hidden: Tensor, share: float, threshold: float) -> Tensor:
    """Do what `strongest` does by the greatest of each row."""
    size = hidden.abs()
    k = kept(share, (size > threshold).sum(-1, keepdim=True))
    values = size.topk(max(1, int(k.max())), dim=-1).values
    least = values.gather(-1, (k - 1).clamp(min=0)).masked_fill(k == 0, torch.inf)
    return hidden.masked_fill(size < least, 0)


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
    """Return how many of each row's firings stay, int64."""
    return torch.ceil(share * firings).long()
