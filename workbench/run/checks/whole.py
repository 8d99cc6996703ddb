"""Remember which files were compared with their checksums as a whole, so that not every reading compares their pages.

A file's state is its inode, size and times. What was compared counts for a day, and for that state alone: later, pages
are compared at every reading again, so that a disk that forgets is noticed too. Cost: none but the memory of a name.
"""

from __future__ import annotations

import os
import time

DAY = 24 * 3600  # s
HELD = 2**16  # files, at most

State = tuple[int, int, int, int]  # inode, size in bytes, time of modification, time of change
_whole: dict[str, tuple[State, float]] = {}  # by path: the state that was compared, and when


def state_of(stat: os.stat_result) -> State:
    """Return what changes whenever a file does."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def remember(path: str, state: State, seconds: float) -> None:
    """Note that a file was found whole in a state. seconds: when, since 1970."""
    if len(_whole) >= HELD:
        _whole.clear()
    _whole[path] = state, seconds


def is_whole(path: str, stat: os.stat_result) -> bool:
    """Return whether a file was found whole as it is now, within a day."""
    state, seconds = _whole.get(path, (None, 0.0))
    return state == state_of(stat) and 0 <= time.time() - seconds < DAY
