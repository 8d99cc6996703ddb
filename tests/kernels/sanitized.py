"""Calls that take every path of the GPU kernels on small shapes: what test_sanitizer.py watches, and no test itself.

python sanitized.py few middle down tiles many cuda    or some of them; all but the last are `hopper`'s
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_checks import make, uneven

from twell.kernels import cuda, hopper
from twell.kernels.call import Call

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
    """On 132 multiprocessors each tile of the gate and up products and each of down, and blocks that are not full."""
    for d_model, d_ff, quiet in zip(
        OUTPUTS, (384, 768, 1024, 1400, 1784, 2040, 2800), (22, 31, 44, 54, -40, 77, 88), strict=True
    ):
        yield make(2000, d_model, d_ff, quiet)
    yield make(100, 192, 264, -40)
    yield make(300, 64, 264, 9, **PLAIN)
    yield make(300, 64, 264, 9, **COUNTS)


def down() -> Iterator[Call]:
    """What racecheck follows of the down product of middle rows: weights that the copy engine brings, as everything
    fires; and gathered ones, where CTAs do not share out the union."""
    for d_model in OUTPUTS:
        yield make(2000, d_model, 768, -4 * d_model)  # shares of whole steps
    for d_model in OUTPUTS[-2:]:
        yield make(2000, d_model, 520, 2 * int(d_model**0.5))


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
    "down": down,
    "tiles": tiles,
    "many": many,
    "whole": whole,
    "cuda": portable,
}

if __name__ == "__main__":
    hopper.Workspace = Workspace  # type: ignore[assignment, misc]
    hopper.planned = lambda n, d_ff: n > 2048  # however few neurons there are
    for name in sys.argv[1:]:
        kernel = cuda if name == "cuda" else hopper
        if reason := kernel.refuses(torch.device("cuda"), torch.bfloat16, 64, 64, 1):
            sys.exit(reason)
        for call in CALLS[name]():
            kernel.run(call)
            torch.cuda.synchronize()
            print(name, *call.x.shape, call.w_gate.shape[0], flush=True)
    print("all done")
