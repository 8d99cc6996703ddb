"""Let a person stop a capture or a training where nothing is lost.

SIGINT and SIGTERM take effect where the work comes to a good end, such as that of a batch; a second one stops at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any


@contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does: what is at hand is then written. For the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Interrupt:
    """A context manager: the first SIGINT or SIGTERM sets `requested`, the second raises KeyboardInterrupt.

    Handlers are set in the main thread only; in any other thread a run ends when its text or its training does.
    after: what is finished first, and why, in words
    """

    def __init__(self, after: str) -> None:
        self.requested = False
        self._notice = f"\nStopping after {after}; press again to stop at once.\n".encode()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler or signal.SIG_DFL)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(2, self._notice)  # not print: the signal may have come in the middle of one
