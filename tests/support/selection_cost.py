"""Measure what selecting and merging examples costs a batch, layer by layer: without bounds, and with those it leaves.

    python tests/support/selection_cost.py [ROWS [LAYERS]]

ROWS: of a batch, default 131 072 on a GPU, 8 192 on a CPU; LAYERS: of 5 632 neurons, whose merge is measured, default
28. Inputs are random, of some 40 firings a row, few neurons often. Prints milliseconds. Cost: 20 s on one H200.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from twell.kernels.backends.selection import Bounds, Rows, Selection
from twell.kernels.backends.selection_native import select, takes
from twell.kernels.layout import Layout, pack
from twell.workbench.capturing.examples import Examples

D_FF, K, NNZ, TURNS = 5632, 8, 40, 10
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def milliseconds(run: Callable[[], object]) -> float:
    """Return the least time of TURNS runs."""
    times = []
    for _ in range(TURNS):
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def main(n: int, layers: int) -> None:
    torch.manual_seed(0)
    density = torch.rand(D_FF, device=DEVICE) ** 8  # mean 1/9: a few neurons fire often
    share = density * (NNZ / density.sum())
    hidden = torch.rand(n, D_FF, device=DEVICE, dtype=torch.bfloat16)
    hidden *= torch.rand(n, D_FF, device=DEVICE, dtype=torch.bfloat16) < share
    packed = pack(hidden, hidden > 0, Layout(256, 8))
    rows, ones = torch.arange(n, dtype=torch.int32, device=DEVICE), torch.ones(n, dtype=torch.uint8, device=DEVICE)
    of_rows = Rows(ones, ones, rows // 1024, rows % 1024, torch.full_like(rows, 1024))
    examples = Examples(layers, D_FF, K)
    out = Selection.empty(layers, D_FF, K, packed.dtype, DEVICE)
    print(f"{DEVICE}, native code: {takes(packed)}, {n} rows, {int(packed.counts.sum()) / n:.1f} firings a row")
    for name in ("without bounds", "with bounds of as many rows"):
        bounds = examples.bounds(0, DEVICE)

        def one(bounds: Bounds = bounds) -> None:
            out.keys.zero_()
            select(packed, of_rows, 0, bounds, out.of_layer(0))

        zeroing, selecting = milliseconds(out.keys.zero_), milliseconds(one)
        merging = milliseconds(lambda: examples.merge(out, of_rows))
        kept = int((out.keys != 0).sum())
        print(f"{name}: select {selecting - zeroing:.3f} a layer, {kept} firings; merge {merging:.3f} for all layers")
    print(f"to the host: {milliseconds(lambda: list(examples.tables()())):.1f}")


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*[*given, *(131_072 if DEVICE.type == "cuda" else 8_192, 28)[len(given) :]])
