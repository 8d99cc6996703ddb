"""Lock a folder for one process. The system releases the lock of a process that dies.

The folder itself is locked, not a file in it, so nothing is left behind. On a file system without locks, every process
gets the lock.
"""

from __future__ import annotations

import fcntl
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

PATIENCE = 5.0  # seconds of waiting for another process before it is said


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
    """Hold the lock of a folder, which is created if it is missing; wait while another process has it, and say so where
    that takes long."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            _wait_for(handle, folder)
        yield
    finally:
        os.close(handle)


def _wait_for(handle: int, folder: Path) -> None:
    """Lock a folder that is open. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = f"Waiting for another process that writes to {folder} …"
        timer = Timer(PATIENCE, print, [said], {"file": sys.stderr, "flush": True})
        timer.daemon = True
        timer.start()
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        finally:
            timer.cancel()
