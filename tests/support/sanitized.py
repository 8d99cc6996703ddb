"""Run under compute-sanitizer calls that take every path of the GPU kernels on small shapes.

python sanitized.py few middle loud tiles many whole squares cuda    or some of them; all but the last are `hopper`'s

It wants PYTORCH_ALLOC_CONF=backend:cudaMallocAsync, so that each tensor is an allocation to the tools, in graphs too.
`sanitized_tests.py` runs the GPU tests so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from support import gpu_checks
from support.gpu_checks import Results, make, uneven
from torch import Tensor

from twell.kernels.backends import cuda, gpu, hopper, union_counts
from twell.kernels.params import FFNParams
from twell.kernels.stats import Stats
from twell.kernels.strongest import strongest

PLAIN: dict[str, Any] = {"gated": False, "bias": True}
COUNTS: dict[str, Any] = {"bias": True, "probes": "counts", "layout": None, "want_packed": False}

make_workspace = gpu.Workspace.__init__
# Workspaces and results of calls in graphs, until a test's graphs have run: memcheck takes memory that two calls have
# in turn for that of the last, and reports what is given back before.
captured: list[Any] = []


def in_parts(workspace: gpu.Workspace, *about: Any) -> None:
    """Allocate each region of a workspace by itself, so that a tool sees accesses past its end, unless traced."""
    make_workspace(workspace, *about)
    if torch.compiler.is_compiling():
        return
    gpu_checks.apart(workspace, torch.empty_like)
    if torch.cuda.is_current_stream_capturing():
        captured.append(workspace)


class FilledWorkspace(hopper.HopperWorkspace):
    """Fill the regions that the copy engine writes, as initcheck does not follow its writes."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        for tensor in (self.tensor("hidden"), self.tensor("spill")):
            tensor.fill_(float("nan"))


def patch_workspaces() -> None:
    gpu.Workspace.__init__ = in_parts  # type: ignore[method-assign]
    hopper.HopperWorkspace = FilledWorkspace  # type: ignore[assignment, misc]


def few() -> Iterator[FFNParams]:
    """Yield calls of 1 to 64 rows: both row tiles; groups where some, most, all neurons fire; stages past the ring."""
    for n, d_model, d_ff, quiet in (
        (1, 128, 264, 9), (8, 128, 264, 9), (13, 72, 264, 20), (20, 128, 264, 9), (24, 136, 600, 30),
        (33, 136, 600, 30), (64, 72, 520, -40), (40, 72, 5000, -288), (24, 1544, 264, 30), (40, 1544, 264, -30),
    ):  # fmt: skip
        yield make(n, d_model, d_ff, quiet)
    for n in (5, 30, 50):
        yield make(n, 64, 264, 9, **PLAIN)
        yield make(n, 64, 264, 9, **COUNTS)
    for n, d_ff, quiet in ((5, 6400, 20), (13, 6344, -60)):  # groups of 64
        yield make(n, 72, d_ff, quiet, **COUNTS)


ON_132 = (  # n, d_model, d_ff: on so many multiprocessors, each tile of the gate and up products, and each way of down
    (2000, 64, 384), (2000, 1056, 504), (2000, 1312, 760), (2000, 1568, 888), (2000, 128, 1016), (2000, 72, 1144),
    (2000, 72, 1200), (2000, 72, 1400), (2000, 128, 1496), (2000, 256, 1784), (2000, 200, 2040), (2000, 64, 2800),
    (129, 2144, 2400), (385, 2080, 2800), (385, 2592, 5600),
)  # fmt: skip


def middle() -> Iterator[FFNParams]:
    """Yield calls that gather weights: blocks that are not full, and few rows of many neurons. Clusters of 256 outputs
    are left out, as they need unions of over 16 384 neurons."""
    for n, d_model, d_ff in ON_132:
        yield make(n, d_model, d_ff, round(1.9 * d_model**0.5))
    yield make(2000, 72, 1400, 11)  # nearly all fires, and tiles are taken whole
    yield make(300, 64, 264, 9, **PLAIN)
    yield make(300, 64, 264, 9, **COUNTS)
    yield make(8, 64, 12_800, 9)


def loud() -> Iterator[FFNParams]:
    """Yield calls in which all neurons fire, so that the copy engine loads the weights."""
    for n, d_model, d_ff in ON_132:
        yield make(n, d_model, d_ff, -4 * d_model, **COUNTS)
    yield make(40, 64, 12_800, -40)


def tiles() -> Iterator[FFNParams]:
    """Yield calls of over 2 048 rows: in place and reordered; packed, spilled and dense tiles; unions of some, all, no
    neurons; split tasks of the down product."""
    yield make(2177, 72, 264, 9)
    yield make(2177, 264, 1016, 12)
    yield uneven(2177, 264, 1016, 30)
    yield make(2241, 64, 600, 10)
    for options in ({}, PLAIN):
        yield make(2100, 64, 264, -40, **options)
    yield make(2100, 64, 264, 9, **PLAIN)
    yield make(2300, 64, 264, 400)
    yield uneven(2300, 136, 520, 6, bias=True)
    yield make(2300, 64, 264, 9, **COUNTS)


def many() -> Iterator[FFNParams]:
    """Yield a call with two gate tiles a CTA, and with so many blocks that no task of the down product is split."""
    yield make(32900, 8, 72, 2)


def whole() -> Iterator[FFNParams]:
    """Yield calls with several rounds of dense tiles, or of tiles both dense and as words, whose up products the gate
    kernel computes."""
    yield make(3800, 264, 2904, -70)
    yield make(3800, 264, 2904, -70, **COUNTS)
    yield make(3800, 264, 2904, 23)


def squares() -> Iterator[FFNParams]:
    """Yield calls with ReLU squared and with ReLU on both branches, for the epilogues of each path."""
    options: dict[str, Any] = {"activation": "relu2", "up_relu": True}
    for n in (13, 40, 300):
        yield make(n, 72, 264, 9, **options)
    yield uneven(2177, 72, 264, 9, **options)
    yield make(2100, 64, 264, -40, **options, **COUNTS)
    yield make(3800, 264, 2904, -70, **options, **COUNTS)
    yield make(2300, 64, 264, -40, activation="relu2", **PLAIN)
    yield make(22_700, 8, 264, 2, activation="relu2", gated=False, **COUNTS)  # CTAs that take several tiles


def added() -> Iterator[FFNParams]:
    """Yield calls for each epilogue that adds what it is given: few rows, blocks that are gathered or taken whole, many
    rows, and outputs in one task or several."""
    for n, quiet in ((1, 9), (13, 20), (24, 9), (50, -40), (300, 9), (300, -40)):
        yield make(n, 72, 264, quiet, **COUNTS)
    for n, d_model, d_ff in ((2000, 72, 1400), (2000, 1056, 504), (2000, 256, 1784), (129, 2144, 2400)):
        yield make(n, d_model, d_ff, round(1.9 * d_model**0.5), **COUNTS)
    yield uneven(2177, 264, 1016, 30, bias=True)
    yield make(2100, 64, 264, -40, **PLAIN)


def portable() -> Iterator[FFNParams]:
    """Yield calls of the `cuda` kernel, in blocks of 16 and of 64 rows."""
    for n in (1, 17, 300):
        for quiet in (9, -40, 400):
            yield make(n, 72, 264, quiet)
        yield make(n, 136, 520, 12, **PLAIN)
        yield make(n, 136, 520, 12, **COUNTS)


CALLS: dict[str, Callable[[], Iterator[FFNParams]]] = {
    "few": few,
    "middle": middle,
    "loud": loud,
    "tiles": tiles,
    "many": many,
    "whole": whole,
    "squares": squares,
    "added": added,
    "cuda": portable,
}


def residual(params: FFNParams) -> Tensor:
    """Return what a call of `added` adds: no two rows or columns alike, [n, d_model]."""
    n, d_model = params.x.shape
    return torch.arange(n * d_model, device=params.x.device).remainder(251).view(n, d_model).to(params.x.dtype)


def run(name: str, params: FFNParams) -> Results:
    """Run a call of `CALLS[name]`."""
    if name == "added":
        return gpu_checks.run_added(params, residual(params))
    return (cuda if name == "cuda" else hopper).run(params)


def count_unions(stats: Stats) -> None:
    """Count the unions of blocks of 16 and 64 rows of a call's packed TwELL, if it returned one."""
    if stats.packed is not None and union_counts.takes(stats.packed):
        row = torch.arange(len(stats.nnz) // 64 * 64, dtype=torch.int32, device=gpu_checks.CUDA)
        union_counts.counts(stats.packed, [row.view(-1, 16), row[: len(row) // 16].view(-1, 4)])


if __name__ == "__main__":
    patch_workspaces()
    hopper.has_plan = lambda n, d_ff: n > 2048  # however few neurons there are
    began = time.perf_counter()
    for name in sys.argv[1:]:
        kernel = cuda if name == "cuda" else hopper
        if reason := kernel.refuses(torch.device("cuda"), torch.bfloat16, 64, 64, 1):
            sys.exit(reason)
        for params in CALLS[name]():
            count_unions(run(name, params)[1])
            strongest(params.x, 0.5)
            torch.cuda.synchronize()
            print(name, *params.x.shape, params.w_gate.shape[0], f"{time.perf_counter() - began:.1f} s", flush=True)
    print("all done")
