"""Lock a folder for one process. The system releases the lock of a process that dies.

The folder itself is locked, not a file in it, so nothing is left behind. On a file system without locks, every process
gets the lock.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def claim(folder: Path, owner: object) -> Callable[[], object] | None:
    """Lock a folder until `owner` is collected.

    Returns the function that unlocks it earlier, or None if another process has the lock.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        pass
    return weakref.finalize(owner, os.close, handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if it is missing; wait while another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
