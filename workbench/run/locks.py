"""Folders that one process has to itself for a while. The system lets go of the lock of a process that dies.

What is locked is the folder, not a file in it, so nothing is left lying. A file system that has no locks lets everybody
in.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def claim(folder: Path, owner: object) -> Callable[[], object] | None:
    """Locks a folder for as long as `owner` lives, or until what comes back is called; None where another has it."""
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
    """Alone with a folder, which is made if need be; waits for whoever has it."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
