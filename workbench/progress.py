"""What a person sees of a capture while it runs, and how it is stopped.

On a terminal a bar with rate, estimate and current mean nnz; elsewhere a plain line now and then. SIGINT and SIGTERM are
noted and answered at the end of a batch, so that what was counted is kept whole; a second one stops at once.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

LINE_SECONDS = 15.0  # between two lines where there is no terminal


class Bar:
    """A context manager; `advance` after each batch. `total` in tokens, None where it is not known."""

    def __init__(self, total: int | None, console: Console) -> None:
        self._total, self._console = total, console
        self._done, self._began = 0, time.monotonic()
        self._said = self._began
        self._progress: Progress | None = None
        if console.is_terminal:
            columns = (SpinnerColumn(), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
            self._progress = Progress(*columns, TextColumn("{task.description}"), console=console, transient=True)
            self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, tokens: int, nnz_mean: float) -> None:
        self._done += tokens
        if self._progress is not None:
            self._progress.update(self._task, advance=tokens, description=f"mean nnz {nnz_mean:.1f}")
            return
        now = time.monotonic()
        if now - self._said >= LINE_SECONDS:
            self._said = now
            rate = self._done / (now - self._began)
            left = f", about {max(0, self._total - self._done) / rate:,.0f} s left" if self._total else ""
            self._console.print(f"{self._done:,} tokens, {rate:,.0f} tokens/s{left}, mean nnz {nnz_mean:.1f}")


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed: Any = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} tokens/s" if speed else "")


class Interrupt:
    """A context manager: `asked` turns true at the first SIGINT or SIGTERM; the second raises KeyboardInterrupt.

    Handlers are set in the main thread only; in any other, a run ends when its text does.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
