"""Shared: tables that several questions ask for, taken once while they are asked together.

    with together():
        ...                # a @shared function is called once with the same arguments; later callers get a copy

Nothing is kept past the block, so a run that grows is read anew by the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import pandas as pd

P = ParamSpec("P")
Table = TypeVar("Table", pd.DataFrame, dict[str, Any])
_held: ContextVar[dict[Any, Any] | None] = ContextVar("held", default=None)


@contextmanager
def together() -> Iterator[None]:
    """Hold what shared functions return, for as long as the outermost block lasts."""
    token = _held.set({} if _held.get() is None else _held.get())
    try:
        yield
    finally:
        _held.reset(token)


def shared(function: Callable[P, Table]) -> Callable[P, Table]:
    """Let callers inside `together` share what it returns. Its first argument is a run, the others are plain values."""

    @functools.wraps(function)
    def once(*given: P.args, **named: P.kwargs) -> Table:
        held = _held.get()
        if held is None:
            return function(*given, **named)
        run: Any = given[0]
        key = (function, run.path, given[1:], tuple(sorted(named.items())))
        if key not in held:
            held[key] = function(*given, **named)
        found = held[key]
        return found.copy(deep=False) if isinstance(found, pd.DataFrame) else dict(found)  # a caller may add to it

    return once
