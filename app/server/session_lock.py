"""Have the runs of a session's pages take turns at its state.

A click ends the run that draws a page, and the next run begins at once in another thread. Until the first one notices,
both use the session's state, each under a lock of its own (Streamlit 1.67). A value that one sets while the other goes
through all keys ends that one with an error, in place of the page that was clicked: once in 1 500 quick clicks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from streamlit.runtime.state import SafeSessionState, SessionState


def share_lock() -> None:
    """Give all views of a session's state that are made from now on the lock of the first one."""
    plain: Callable[..., None] = SafeSessionState.__init__
    locks: dict[int, threading.RLock] = {}  # by the state's address; a later state at the same one may have its lock

    def begin(view: SafeSessionState, state: SessionState, *arguments: Any, **named: Any) -> None:
        plain(view, state, *arguments, **named)
        object.__setattr__(view, "_lock", locks.setdefault(id(state), view._lock))

    setattr(SafeSessionState, "__init__", begin)  # noqa: B010  (mypy takes no assignment to a method)
