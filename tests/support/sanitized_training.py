"""Run under compute-sanitizer training calls that take every path of the backward pass on small shapes.

python sanitized_training.py worst fits dense passes    or some of them

`worst`: in the workspace of the worst case; the others in compact ones (`hopper_compact`): what is kept fits; it does
not, and all is computed densely; likewise, in as many passes as there can be. Forward passes take 1 024 rows at a time.

Not for initcheck, which does not follow what bulk copies write: all panels and chunks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from support import gpu_training

from twell.kernels.backends import hopper_backward, hopper_compact

# n, d_model, d_ff: rows and neurons that fill no block and no group, tiles that several CTAs share, a row
SHAPES = ((1290, 136, 328), (700, 264, 520), (1, 64, 72))


def worst() -> dict[str, int]:
    """Return the options of calls in the workspace of the worst case."""
    hopper_compact.ENABLED = False
    return {}


def fits() -> dict[str, int]:
    """Let compact workspaces hold all that is kept, and return the options of calls."""
    hopper_compact.ENABLED, hopper_compact.FORWARD_ROWS, hopper_compact.ROOM = True, 1024, 1e6
    return {"capacity": 2**14}


def dense() -> dict[str, int]:
    """Let calls keep a value a row, and return their options."""
    hopper_compact.ENABLED, hopper_compact.FORWARD_ROWS = True, 1024
    return {"capacity": 1}


def passes() -> dict[str, int]:
    """Leave compact workspaces what `PASSES` dense passes need, and return the options of calls."""
    hopper_compact.ROOM, hopper_compact.SMALL = 0.0, 0
    return dense()


CALLS: dict[str, Callable[[], dict[str, int]]] = {"worst": worst, "fits": fits, "dense": dense, "passes": passes}


def refuses() -> str | None:
    """Return why no training call runs here, or None. Build the kernels to find out."""
    return hopper_backward.refuses(torch.device("cuda"), torch.bfloat16, 64, 64, 1, True, False, "relu")


def main(names: list[str]) -> None:
    """Run the named calls, some neurons firing and all of them, and wait for each."""
    if reason := refuses():
        sys.exit(reason)
    began = time.perf_counter()
    for name in names:
        options = CALLS[name]()
        for shape in SHAPES:
            for shift in (-2.2, 60.0):
                gpu_training.ours(gpu_training.made(*shape, shift), **options)
                torch.cuda.synchronize()
                print(name, *shape, shift, f"{time.perf_counter() - began:.1f} s", flush=True)
    print("all done")


if __name__ == "__main__":
    main(sys.argv[1:])
