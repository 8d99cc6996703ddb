"""Count on the GPU how many different neurons fire in blocks of rows, from the packed hidden state.

A block's union has one bit for each neuron in shared memory, set from the words of its rows; that of a larger block
combines the bits of smaller ones. Nothing waits for the host. Cost: one read of the words that are in use.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from twell.kernels import build
from twell.kernels.build import Library, Source
from twell.kernels.layout import TwELL

MAX_COLUMNS = 2**18  # greatest d_ff, padded to whole tiles, whose bits fit into shared memory


@cache
def library(capability: tuple[int, int]) -> Library:
    """Return the library for GPUs of this compute capability, (major, minor)."""
    arch = "-gencode=arch=compute_{0}{1},code=sm_{0}{1}".format(*capability)
    sources = (Source("unions/unions.cu", (arch,)), Source("unions/bindings.cpp"))
    return Library("unions", sources, headers=("common/*", "packed/*", "unions/*"), seconds=8, cuda=True)


def takes(packed: TwELL) -> bool:
    """Return whether `counts` can take this packed state. Compiles the library to find out, once a process."""
    device = packed.device
    wide = packed.layout.tiles(packed.d_ff) * packed.layout.tile
    if device.type != "cuda" or packed.dtype == torch.float64 or wide > MAX_COLUMNS:
        return False
    capability = torch.cuda.get_device_capability(device)
    return capability >= (8, 0) and build.failure(library(capability)) is None


def counts(packed: TwELL, members: list[Tensor]) -> Tensor:
    """Count blocks by the number of neurons in their union: int64 [block sizes, d_ff + 1].

    members: an int32 tensor on the device for each block size, the smallest first. The first has row numbers, [blocks,
    rows of a block]; each later one has numbers of blocks of the size before, [blocks, members]
    """
    heads, tails, spill_index, spill = packed.stored()
    layout, device = packed.layout, heads.device
    words = layout.tiles(packed.d_ff) * layout.tile // 32
    histograms = torch.zeros(len(members), packed.d_ff + 1, dtype=torch.int64, device=device)
    smaller: Tensor | None = None
    for blocks, histogram in zip(members, histograms, strict=True):
        marks = torch.empty(len(blocks), words, dtype=torch.int32, device=device)
        if smaller is None:
            rows = (heads, tails, spill_index, spill, blocks.contiguous())
            torch.ops.twell.unions_of_rows(*rows, marks, histogram, layout.tile, layout.slots)
        else:
            torch.ops.twell.unions_of_blocks(smaller, blocks.contiguous(), marks, histogram)
        smaller = marks
    return histograms
