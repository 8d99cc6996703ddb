"""A small disk in memory, of this process and its children alone, that can be filled and freed again.

It needs the right to mount, which a container's root often has; where it lacks, `mounted` says so.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SIZE = 2**25  # bytes
NEW_NAMESPACE, PRIVATE, RECURSIVE = 0x20000, 1 << 18, 1 << 14  # of unshare(2) and mount(2)
FILLER = "filler"


def mounted(folder: Path) -> bool:
    """Mount a disk at an empty folder until this process and its children end; return whether that is allowed."""
    folder.mkdir()
    system = ctypes.CDLL(None, use_errno=True)
    if system.unshare(NEW_NAMESPACE) or system.mount(b"none", b"/", None, RECURSIVE | PRIVATE, None):
        return False
    line = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    return subprocess.run(line, capture_output=True, check=False).returncode == 0


@contextmanager
def filled(folder: Path, room: int) -> Iterator[None]:
    """Fill a disk but for `room` bytes, rounded up to pages, while the block lasts."""
    state = os.statvfs(folder)
    path = folder / FILLER
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, state.f_bavail * state.f_frsize - room))
    try:
        yield
    finally:
        path.unlink()
