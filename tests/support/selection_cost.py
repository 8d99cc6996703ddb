"""Measure what selecting and merging examples costs a batch, layer by layer: without bounds, and with those it leaves.

    python tests/support/selection_cost.py [ROWS [LAYERS]]

ROWS: of a batch, default 131 072 on a GPU, 8 192 on a CPU; LAYERS: of 5 632 neurons, whose merge is measured, default
28. Inputs are random: neurons that fire hardly to always, rows of which some fire several times as much as others, for
each mean nnz in NNZ. On a GPU they lie where the hopper kernel leaves them if that takes them, and are selected by both
scans in turns, whose results are compared. Prints milliseconds. Cost: a minute of one H200, and some 30 GB of it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch

from twell.kernels.backends import hopper
from twell.kernels.backends.selection import RowMetadata, Selection
from twell.kernels.backends.selection_native import select, takes
from twell.kernels.layout import Layout, TwELL, pack
from twell.workbench.capturing.examples import Examples

D_FF, K, NNZ, TURNS = 5632, 8, (7, 40, 145, 600, 2549), 10
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def milliseconds(run: Callable[[], object]) -> float:
    """Return the time of one run."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def made(n: int, nnz: int) -> TwELL:
    """Return a packed state of bfloat16 whose rows fire about nnz neurons in the mean."""
    density = torch.rand(D_FF, device=DEVICE) ** (D_FF / nnz - 1)
    loud = (0.7 * torch.randn(n, 1, device=DEVICE)).exp()
    hidden = torch.rand(n, D_FF, device=DEVICE, dtype=torch.bfloat16)
    for rows in torch.arange(n).split(4096):
        fired = torch.rand(len(rows), D_FF, device=DEVICE) < density * loud[rows[0] : rows[-1] + 1]
        hidden[rows[0] : rows[-1] + 1] *= fired
    packed = pack(hidden, hidden > 0, Layout(256, 8))
    del hidden
    if hopper.refuses(DEVICE, torch.bfloat16, D_FF, D_FF, n) is not None or not hopper.has_plan(n, D_FF):
        return packed
    workspace = hopper.HopperWorkspace(n, D_FF, torch.bfloat16, DEVICE)
    workspace.fill(packed)
    return hopper.LazyTwELL(workspace, D_FF, torch.ones(n, dtype=torch.bool, device=DEVICE))


def report(n: int, layers: int, nnz: int) -> None:
    """Print a line for the first batch of so many rows, and one for those that follow."""
    packed = made(n, nnz)
    rows, ones = torch.arange(n, dtype=torch.int32, device=DEVICE), torch.ones(n, dtype=torch.uint8, device=DEVICE)
    of_rows = RowMetadata(ones, ones, rows // 1024, rows % 1024, torch.full_like(rows, 1024))
    examples, out = Examples(layers, D_FF, K), Selection.empty(layers, D_FF, K, packed.dtype, DEVICE)
    one = out.of_layer(0)
    ways = {"by rows": False, "by tiles": True} if DEVICE.type == "cuda" else {"in C++": False}
    for name in ("without bounds", "with bounds of as many rows"):
        bounds = examples.bounds(0, DEVICE)
        times: dict[str, list[float]] = {way: [] for way in ways}
        keys: dict[str, torch.Tensor] = {}
        for _ in range(TURNS):
            for way, by_tiles in ways.items():
                out.keys.zero_(), out.fires.zero_()
                run = lambda by_tiles=by_tiles, bounds=bounds: select(packed, of_rows, 0, bounds, one, by_tiles)  # noqa: E731
                times[way].append(milliseconds(run))
                keys[way] = torch.cat([one.keys.flatten(), one.fires.flatten().long()])
        same = all(torch.equal(first, keys[next(iter(ways))]) for first in keys.values())
        nnz_mean = int(out.fires.sum()) / n
        merging = min(milliseconds(lambda: examples.merge(out, of_rows)) for _ in range(3))
        took = "; ".join(f"{way} {statistics.median(taken):.3f} ({min(taken):.3f})" for way, taken in times.items())
        print(
            f"nnz {nnz_mean:.1f}, {name}: {took} a layer, median (least); same {same}; merge {merging:.2f}", flush=True
        )


def main(n: int, layers: int) -> None:
    torch.manual_seed(0)
    for nnz in NNZ:
        report(n, layers, nnz)
    small = pack(torch.ones(1, 8, dtype=torch.bfloat16, device=DEVICE), torch.ones(1, 8, device=DEVICE) > 0, Layout())
    print(f"{DEVICE}, {n} rows, native code: {takes(small)}")


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*[*given, *(131_072 if DEVICE.type == "cuda" else 8_192, 28)[len(given) :]])
