"""When Python looks for garbage: not among what libraries make as they are imported, which stays to the end.

The looks take a fifth of importing torch and transformers, and the last one, as the process ends, a second.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects made, and looks at younger ones, between two looks; Python's 700 are for small programs.
AFTER = 50_000, 20, 100


@contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage inside, where modules are imported, never again among what there is then, and else seldom.

    At the end of the process no objects are looked through either; what must be closed is closed by `with` or `atexit`.
    """
    atexit.register(gc.freeze)  # before what is imported registers its own, so it runs after that
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.set_threshold(*AFTER)
        gc.enable()
