"""Unions: how many different neurons blocks of rows fire, counted on the GPU where the packed hidden state lies.

A block's union is a bit a neuron in shared memory, set from the words of its rows; larger blocks are made of the bits
of smaller ones. Nothing waits for the host. Cost: reading the words that hold something, once.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from twell.kernels import build
from twell.kernels.build import Library, Source
from twell.kernels.layout import TwELL

MAX_COLUMNS = 2**18  # of d_ff filled up to whole tiles: their bits lie in shared memory


@cache
def library(capability: tuple[int, int]) -> Library:
    """The sources, for GPUs of this compute capability."""
    arch = "-gencode=arch=compute_{0}{1},code=sm_{0}{1}".format(*capability)
    sources = (Source("unions/unions.cu", (arch,)), Source("unions/bindings.cpp"))
    return Library("unions", sources, headers=("common/*", "unions/*"), seconds=8, cuda=True)


def takes(packed: TwELL) -> bool:
    """Whether these launches count this state; builds them to find out, once a process."""
    device = packed.device
    wide = packed.layout.tiles(packed.d_ff) * packed.layout.tile
    if device.type != "cuda" or packed.dtype == torch.float64 or wide > MAX_COLUMNS:
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability >= (8, 0) and build.failure(library(capability)) is None


def counts(packed: TwELL, members: list[Tensor]) -> Tensor:
    """int64 [sizes of a block, d_ff + 1]: how many blocks have a union of so many neurons.

    members: int32 on the device: [blocks, rows of one] of the smallest size, then for each further one [blocks, blocks
    of the size before]
    """
    heads, tails, spill_index, spill = packed.stored()
    layout, device = packed.layout, heads.device
    words = layout.tiles(packed.d_ff) * layout.tile // 32
    histograms = torch.zeros(len(members), packed.d_ff + 1, dtype=torch.int64, device=device)
    smaller: Tensor | None = None
    for blocks, histogram in zip(members, histograms, strict=True):
        marks = torch.empty(len(blocks), words, dtype=torch.int32, device=device)
        if smaller is None:
            given = (heads, tails, spill_index, spill, blocks.contiguous())
            torch.ops.twell.unions_of_rows(*given, marks, histogram, layout.tile, layout.slots)
        else:
            torch.ops.twell.unions_of_blocks(smaller, blocks.contiguous(), marks, histogram)
        smaller = marks
    return histograms
