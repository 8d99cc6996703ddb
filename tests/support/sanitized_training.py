"""Run under compute-sanitizer training calls that take every path of the backward pass on small shapes.

python sanitized_training.py worst fits dense passes at_once kept biased    or some of them

`worst`: in the workspace of the worst case; the others in compact ones (`hopper_compact`): what is kept fits; it does
not, and all is computed densely; likewise, in as many passes as there can be; at once; from g and h that were kept.
`biased`: what fits, what does not and what is kept whole, with biases. Forward passes take 1 024 rows at a time.

Not for initcheck, which does not follow what bulk copies write: all panels and chunks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

import torch
from support import gpu_training
from torch import Tensor

from twell.kernels.backends import hopper_backward, hopper_compact

# n, d_model, d_ff: rows and neurons that fill no block and no group, tiles that several CTAs share, a row
SHAPES = ((1290, 136, 328), (700, 264, 520), (1, 64, 72))


Options = dict[str, int]


def worst() -> Iterator[Options]:
    """Yield the options of calls in the workspace of the worst case."""
    hopper_compact.ENABLED = False
    yield {}


def fits() -> Iterator[Options]:
    """Let compact workspaces hold all that is kept, and yield the options of calls."""
    hopper_compact.ENABLED, hopper_compact.FORWARD_ROWS, hopper_compact.ROOM = True, 1024, 1e6
    hopper_compact.AT_ONCE = False
    yield {"capacity": 2**14}


def dense() -> Iterator[Options]:
    """Let calls keep a value a row, and yield their options."""
    hopper_compact.ENABLED, hopper_compact.FORWARD_ROWS, hopper_compact.AT_ONCE = True, 1024, False
    yield {"capacity": 1}


def passes() -> Iterator[Options]:
    """Leave compact workspaces what `PASSES` dense passes need, and yield the options of calls."""
    hopper_compact.ROOM, hopper_compact.SMALL = 0.0, 0
    yield from dense()


def at_once() -> Iterator[Options]:
    """Let what does not fit be computed at once, and yield the options of calls."""
    hopper_compact.ROOM = 1e6
    hopper_compact.ENABLED, hopper_compact.FORWARD_ROWS, hopper_compact.AT_ONCE = True, 1024, True
    yield {"capacity": 1}


def kept() -> Iterator[Options]:
    """Let g and h be kept whole, and yield the options of calls."""
    hopper_compact.WHOLE_FROM = 0.0
    hopper_compact.ENABLED, hopper_compact.FORWARD_ROWS, hopper_compact.AT_ONCE = True, 1024, True
    yield {}


def biased() -> Iterator[Options]:
    """Yield the options of calls with biases."""
    yield from worst()
    yield from fits()
    yield from dense()
    yield from kept()


CALLS: dict[str, Callable[[], Iterator[Options]]] = {
    "worst": worst, "fits": fits, "dense": dense, "passes": passes, "at_once": at_once, "kept": kept,
    "biased": biased,
}  # fmt: skip


def refuses() -> str | None:
    """Return why no training call runs here, or None. Build the kernels to find out."""
    return hopper_backward.refuses(torch.device("cuda"), torch.bfloat16, 64, 64, 1, True, "relu")


def arguments(name: str) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield what to print of a call and its tensors, for each shape, some neurons firing and all of them."""
    for n, d_model, d_ff in SHAPES:
        for shift in (-2.2, 60.0):
            tensors = gpu_training.made(n, d_model, d_ff, shift)
            for many in (d_ff, d_ff, d_model) if name == "biased" else ():  # of gate, up and down
                tensors.append(torch.full((many,), 0.1, dtype=torch.bfloat16, device="cuda").requires_grad_())
            yield f"{name} {n} {d_model} {d_ff} {shift}", tensors


def main(names: list[str]) -> None:
    """Run the named calls and wait for each."""
    if reason := refuses():
        sys.exit(reason)
    began = time.perf_counter()
    for name in names:
        for options in CALLS[name]():
            for about, tensors in arguments(name):
                gpu_training.ours(tensors, **options)
                torch.cuda.synchronize()
                print(about, f"{time.perf_counter() - began:.1f} s", flush=True)
    print("all done")


if __name__ == "__main__":
    main(sys.argv[1:])
