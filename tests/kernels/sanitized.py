"""What compute-sanitizer watches: calls that take every path of the GPU kernels on small shapes; and the GPU tests.

python sanitized.py few middle tiles many whole cuda    or some of them; all but the last are `hopper`'s
python -m pytest -p sanitized -m gpu FILE               its tests, but for what they compare: the plain run holds them
                                                        to that, and here it would take most of the time

Both want PYTORCH_ALLOC_CONF=backend:cudaMallocAsync, so that each tensor is an allocation to the tools, in graphs too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import gpu_checks
import torch
from gpu_checks import make, uneven
from torch import Tensor

from twell.kernels import cuda, hopper, reference, unions
from twell.kernels.call import Call, Stats

PLAIN: dict[str, Any] = {"gated": False, "bias": True}
COUNTS: dict[str, Any] = {"bias": True, "probes": "counts", "layout": None, "want_packed": False}


class Workspace(hopper.Workspace):
    """One that counts as written where the copy engine writes, which initcheck does not follow."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        for tensor in (self.hidden, self.spill):
            tensor.fill_(float("nan"))


def few() -> Iterator[Call]:
    """Both tiles of rows of both ways; of a group's neurons some fire, most, and all."""
    for n, d_model, d_ff, quiet in (
        (1, 128, 264, 9), (8, 128, 264, 9), (13, 72, 264, 20), (20, 128, 264, 9), (24, 136, 600, 30),
        (33, 136, 600, 30), (64, 72, 520, -40),
    ):  # fmt: skip
        yield make(n, d_model, d_ff, quiet)
    for n in (5, 30, 50):
        yield make(n, 64, 264, 9, **PLAIN)
        yield make(n, 64, 264, 9, **COUNTS)


OUTPUTS = (128, 256, 512, 768, 1024, 1536, 2048)  # d_model, for each way of the down product on 132 multiprocessors


def middle() -> Iterator[Call]:
    """On 132 multiprocessors each tile of the gate and up products and each of down, its weights gathered and, as
    everything fires, brought by the copy engine; and blocks that are not full."""
    for d_model, d_ff, quiet in zip(
        OUTPUTS, (384, 768, 1024, 1400, 1784, 2040, 2800), (22, 31, 44, 54, -40, 77, 88), strict=True
    ):
        yield make(2000, d_model, d_ff, quiet)
        yield make(2000, d_model, 768, -4 * d_model, **COUNTS)
    yield make(100, 192, 264, -40)
    yield make(300, 64, 264, 9, **PLAIN)
    yield make(300, 64, 264, 9, **COUNTS)


def tiles() -> Iterator[Call]:
    """Rows in place and in another order, tiles in words, spilled and whole; unions of some, of all and of none; tasks
    of the down product that are cut."""
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


def many() -> Iterator[Call]:
    """Two tiles of the gate product to a CTA, and so many blocks that no task of the down product is cut."""
    yield make(32900, 8, 72, 2)


def whole() -> Iterator[Call]:
    """More rounds of tiles than one, that lie whole: the gate's kernel goes on with their up products."""
    yield make(3800, 264, 2904, -70)
    yield make(3800, 264, 2904, -70, **COUNTS)


def portable() -> Iterator[Call]:
    """Blocks of 16 rows and of 64."""
    for n in (1, 17, 300):
        for quiet in (9, -40, 400):
            yield make(n, 72, 264, quiet)
        yield make(n, 136, 520, 12, **PLAIN)
        yield make(n, 136, 520, 12, **COUNTS)


CALLS: dict[str, Callable[[], Iterator[Call]]] = {
    "few": few,
    "middle": middle,
    "tiles": tiles,
    "many": many,
    "whole": whole,
    "cuda": portable,
}


def count_unions(stats: Stats) -> None:
    """Of blocks of 16 rows and of 64 of what a call has packed, if it has."""
    if stats.packed is not None and unions.takes(stats.packed):
        row = torch.arange(len(stats.nnz) // 64 * 64, dtype=torch.int32, device=gpu_checks.CUDA)
        unions.counts(stats.packed, [row.view(-1, 16), row[: len(row) // 16].view(-1, 4)])


def in_a_graph(run: gpu_checks.Run, *_: Any) -> None:
    """Captures a call and replays it. Its results stay in the graph: memcheck reports what touches them outside."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()


def pytest_configure() -> None:
    """Leaves the tests their calls; what the reference would give is what the kernel has just given, or `cuda`."""
    cuda.refuses(gpu_checks.CUDA, torch.bfloat16, 64, 64, 1)  # makes its op known, which tests of `hopper` do not
    hopper.Workspace = Workspace  # type: ignore[assignment, misc]
    gpu_checks.assert_same = gpu_checks.poison = lambda *_, **__: None
    gpu_checks.assert_same_in_a_graph = in_a_graph
    last: tuple[Call, tuple[Tensor, Stats]] | None = None

    def kept(run: Callable[[Call], tuple[Tensor, Stats]]) -> Callable[[Call], tuple[Tensor, Stats]]:
        def keeps(call: Call) -> tuple[Tensor, Stats]:
            nonlocal last
            last = call, run(call)
            return last[1]

        return keeps

    hopper.run, cuda.run = kept(hopper.run), kept(cuda.run)
    reference.run = lambda call: last[1] if last is not None and last[0] is call else cuda.run(call)


if __name__ == "__main__":
    hopper.Workspace = Workspace  # type: ignore[assignment, misc]
    hopper.planned = lambda n, d_ff: n > 2048  # however few neurons there are
    for name in sys.argv[1:]:
        kernel = cuda if name == "cuda" else hopper
        if reason := kernel.refuses(torch.device("cuda"), torch.bfloat16, 64, 64, 1):
            sys.exit(reason)
        for call in CALLS[name]():
            count_unions(kernel.run(call)[1])
            torch.cuda.synchronize()
            print(name, *call.x.shape, call.w_gate.shape[0], flush=True)
    print("all done")
