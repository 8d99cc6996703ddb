"""Results that several questions need, computed once while a scope is open.

    with memo_scope():
        ...                # a @memoized function runs once for the same arguments; later callers get a copy

Nothing is kept after the outermost scope ends, so the next scope reads a growing run anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import pandas as pd

P = ParamSpec("P")
Result = TypeVar("Result")
_memo: ContextVar[dict[Any, Any] | None] = ContextVar("memo", default=None)


@contextmanager
def memo_scope() -> Iterator[None]:
    """Keep what memoized functions return until the outermost scope ends; each thread has scopes of its own."""
    token = _memo.set({} if _memo.get() is None else _memo.get())
    try:
        yield
    finally:
        _memo.reset(token)


def memoized(function: Callable[P, Result]) -> Callable[P, Result]:
    """Let callers within one memo_scope share what a function returns; outside of a scope it is simply called.

    function: its first argument has a `path` and says what is `left_out` (a run, or its open summaries), the others are
    plain values. A DataFrame or dict is copied for each caller, who may add to it; any other result must be immutable.
    Errors are not kept.
    """

    @functools.wraps(function)
    def once(*args: P.args, **kwargs: P.kwargs) -> Result:
        memo = _memo.get()
        if memo is None:
            return function(*args, **kwargs)
        first: Any = args[0]
        key = (function, first.path, first.left_out, args[1:], tuple(sorted(kwargs.items())))
        if key not in memo:
            memo[key] = function(*args, **kwargs)
        return _copied(memo[key])

    return once


def _copied(result: Any) -> Any:
    """Return a shallow copy of a DataFrame or dict, and anything else as it is."""
    if isinstance(result, pd.DataFrame):
        return result.copy(deep=False)
    return dict(result) if isinstance(result, dict) else result
