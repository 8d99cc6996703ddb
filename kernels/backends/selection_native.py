"""Select the firings of a batch that may be kept as examples as `selection.py` does, in C++ and in CUDA.

One pass reads the words in use once, counts each firing by its value, and inserts those within the bounds into lists of
their neuron; another copies windows. In which order firings are inserted does not matter. On a GPU these are two
launches, nothing waits for the host, and all results have shapes that do not depend on the data. There are two scans,
which select the same: a warp takes a row, or a CTA a tile of many rows (`BY_TILES`).

Cost: beside the words an atomic addition a firing; in the first batch, without bounds, some hundred insertions a
neuron. By tiles these additions are in shared memory. Memory: d_ff * BANDS * k keys of 8 bytes while it runs.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from twell.kernels import build
from twell.kernels.backends import selection as in_torch
from twell.kernels.backends.cpu import FLAGS
from twell.kernels.backends.selection import BANDS, Bounds, RowMetadata, Selection
from twell.kernels.build import Library, Source
from twell.kernels.layout import TwELL

BY_TILES = True  # of scans on a GPU: 1.1 to 8 times as fast as by rows, the more the denser rows are
DTYPES = {"cuda": (torch.bfloat16, torch.float16), "cpu": (torch.float32, torch.bfloat16)}
CPU = Library(
    "selection_cpu",
    (Source("selection/host.cpp", FLAGS),),
    headers=("packed/packed.h", "selection/*.h"),
    seconds=5,
)


@cache
def library(capability: tuple[int, int]) -> Library:
    """Return the library for GPUs of this compute capability, (major, minor)."""
    arch = "-gencode=arch=compute_{0}{1},code=sm_{0}{1}".format(*capability)
    typed = (Source("selection/selection.cu", (arch, f"-DTWELL_T={value}")) for value in ("__nv_bfloat16", "__half"))
    sources = (*typed, Source("selection/bindings.cpp"))
    return Library("selection", sources, headers=("common/*", "packed/*", "selection/*"), seconds=8, cuda=True)


def takes(packed: TwELL) -> bool:
    """Return whether `select` can take this packed state. Compiles the library to find out, once a process."""
    device = packed.device
    if packed.dtype not in DTYPES.get(device.type, ()):
        return False
    if device.type == "cpu":
        return build.failure(CPU) is None
    capability = torch.cuda.get_device_capability(device)
    return capability >= (8, 0) and build.failure(library(capability)) is None


def select(
    packed: TwELL, rows: RowMetadata, layer: int, bounds: Bounds, out: Selection, by_tiles: bool | None = None
) -> None:
    """Select a layer's firings in a batch; arguments as of `selection.select`, windows of the dtype of the values.

    by_tiles: how a GPU scans; default BY_TILES
    """
    if not takes(packed):
        in_torch.select(packed, rows, layer, bounds, out)
        return
    d_ff, k = out.keys.shape[1:]
    stored: tuple[Tensor, Tensor | None, Tensor | None, Tensor]
    how: tuple[bool, ...] = ()
    if packed.device.type == "cpu":
        op = torch.ops.twell.select_firings_cpu
        stored = packed.words, packed.values, packed.spill_index, packed.spill
    else:
        op = torch.ops.twell.select_firings
        stored, how = packed.stored(), (BY_TILES if by_tiles is None else by_tiles,)
    n = len(stored[0])
    if n != len(rows.counted) or out.windows.dtype != packed.dtype:
        raise ValueError(
            f"expected {len(rows.counted)} rows and windows of {packed.dtype}, got {n} and {out.windows.dtype}"
        )
    bands = torch.zeros(d_ff, BANDS, k, dtype=torch.int64, device=packed.device)
    op(
        *stored, rows.counted, rows.eligible, rows.sequence, rows.position, rows.length,
        layer, bounds.value, bounds.draw, out.keys, bands, out.fires, out.windows,
        packed.layout.tile, packed.layout.slots, *how,
    )  # fmt: skip
