"""Open regular files alone: a run may come from anywhere, and a pipe or a device in a file's place never ends.

Cost: two system calls a file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

MOST_TEXT = 2**30  # bytes of a manifest or a list, far above those of the longest runs


def require_regular(path: Path | str) -> os.stat_result:
    """Return the state of a regular file, or of the one that a link leads to; raise OSError for anything else."""
    state = os.stat(path)
    if not stat.S_ISREG(state.st_mode):
        raise OSError(f"{_kind(state.st_mode)} of that name, not a file")
    return state


def read_text(path: Path) -> str:
    """Return the content of a small text file. Raises OSError and UnicodeDecodeError; never waits for a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        state = os.fstat(handle)
        if not stat.S_ISREG(state.st_mode):
            raise OSError(f"{_kind(state.st_mode)} of that name, not a file")
        if state.st_size > MOST_TEXT:
            raise OSError(f"a file of {state.st_size:,} bytes, and at most {MOST_TEXT:,} are read")
        return file.read().decode("utf-8")


def is_within(path: Path, folder: Path) -> bool:
    """Return whether a path, with its links followed, lies in a folder."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def remove_leftover(path: Path) -> None:
    """Remove what stands in the place of a temporary file: a link that was left there would lead the writer away."""
    if os.path.lexists(path):
        path.unlink()


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")
