"""Have the runs of a session's pages take turns at what they share, and end those that a newer one has replaced.

A click ends the run that draws a page, and the next run begins at once in another thread. Until the first one notices,
both use the session's state, its address and its page, each under a lock of its own (Streamlit 1.67). A value that one
sets while the other goes through all keys ends that one with an error, in place of the page that was clicked: once in
1 500 quick clicks. And a run that was about to begin anew, as one that has seen a growing run grow, first sets the
address and the page that it knew, under the run that the click began: what was chosen is not drawn, though the
browser's address names it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from streamlit.runtime.pages_manager import PagesManager
from streamlit.runtime.scriptrunner import get_script_run_ctx
from streamlit.runtime.scriptrunner.script_runner import ScriptRunner


class Turn:
    """The lock that the runs of a session share. The newest one can take it; an older one ends as it tries."""

    def __init__(self, pages: PagesManager) -> None:
        self._session = vars(pages)  # the session's runs share one manager of its pages
        self._lock: threading.RLock = self._session.setdefault("runs_lock", threading.RLock())
        self._session["newest_run"] = self

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._session["newest_run"] is not self:
            self._lock.release()
            raise SystemExit  # ends the run's thread; what it would still say is not heard any more

    def __exit__(self, *raised: object) -> None:
        self._lock.release()


def take_turns() -> None:
    """Give all runs that are made from now on a turn as the lock of their session's state, its address and its page."""
    plain: Callable[..., None] = ScriptRunner.__init__

    def begin(runner: ScriptRunner, *arguments: Any, **named: Any) -> None:
        plain(runner, *arguments, **named)
        object.__setattr__(runner._session_state, "_lock", Turn(runner._pages_manager))

    setattr(ScriptRunner, "__init__", begin)  # noqa: B010  (mypy takes no assignment to a method)
    for name in ("set_script_intent", "set_current_page_script_hash"):
        setattr(PagesManager, name, _in_turn(getattr(PagesManager, name)))


def _in_turn(plain: Callable[..., None]) -> Callable[..., None]:
    """Return a method that sets the page, for a run only in its turn."""

    def set_page(pages: PagesManager, *arguments: Any, **named: Any) -> None:
        context = get_script_run_ctx(suppress_warning=True)
        if context is None:
            plain(pages, *arguments, **named)
        else:
            with context.session_state._lock:
                plain(pages, *arguments, **named)

    return set_page
