"""Results that several questions need, computed once while a scope is open.

    with memo_scope():
        ...                # a @memoized function runs once for the same arguments; later callers get a copy

Nothing is kept after the outermost scope ends, so the next scope reads a growing run anew.

Figures are kept longer, by what they are built from:

    built_once(ridges, bins, by_layer)   # in place of ridges(bins, by_layer)

plotly takes 20 to 70 ms to build one, most of a click's time on the server. It is kept under the function and the
content of its tables, and not by run or page, so that no figure can outlive its rows. Cost: a millisecond for the
content of a table of some thousand rows.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np
import pandas as pd

if TYPE_CHECKING:  # tables need no plotly
    from plotly.graph_objects import Figure

P = ParamSpec("P")
Result = TypeVar("Result")
_memo: ContextVar[dict[Any, Any] | None] = ContextVar("memo", default=None)
MOST = 64  # figures that are kept, of some 100 kB each
DIGITS = 7  # of a float in a kept figure
PLAIN = (str, int, float, bool, type(None), np.generic)

_kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
_lock = threading.Lock()


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
        first: Any = args[0] if args else None
        if memo is None or not hasattr(first, "left_out"):  # the function refuses what is no run
            return function(*args, **kwargs)
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


def built_once(build: Callable[..., Result], *arguments: Any) -> Result:
    """Return `build(*arguments)`, built once for the same content. It is shared: do not change it.

    Args:
        build: a function of a module; what it returns must follow from its arguments alone.
        arguments: tables, arrays, plain values, and functions of modules. With any other it is built anew.
    """
    try:
        key = tuple(_content(value) for value in (build, *arguments))
    except TypeError:
        return build(*arguments)
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            found: Result = _kept[key]
            return found
    result = build(*arguments)
    if hasattr(result, "add_traces"):
        _drawn_once(result, _digest(np.frombuffer(repr(key).encode(), np.uint8)).hex())
    with _lock:
        _kept[key] = result
        while len(_kept) > MOST:
            _kept.popitem(last=False)
    return result


def _drawn_once(figure: Figure, revision: str) -> None:
    """Let plotly.js draw a figure once where Streamlit hands it over twice, in copies of the same content.

    It takes copies for the same only if the figure names its content, and only where its numbers are lists: arrays
    with a type of their own always count as changed.

    Args:
        figure: the figure, which is changed.
        revision: a name of its content.
    """
    figure.layout.datarevision = revision
    traces = [_lists(trace.to_plotly_json()) for trace in figure.data]
    figure.data = ()
    figure.add_traces(traces)


def _lists(value: Any) -> Any:
    """Return a part of a figure with its arrays as lists; floats have DIGITS there, all that a picture can show."""
    if isinstance(value, dict):
        return {key: _lists(entry) for key, entry in value.items()}
    if not isinstance(value, np.ndarray):
        return value
    if value.ndim > 1:
        return [_lists(row) for row in value]
    if value.dtype.kind != "f":
        return value.tolist()
    return [float(f"{entry:.{DIGITS}g}") if entry == entry else None for entry in value.tolist()]


def _content(value: Any) -> Any:
    """Return what is equal for values of the same content, and for no others. TypeError where that cannot be told."""
    if isinstance(value, PLAIN):
        return type(value), repr(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_content, value))
    if isinstance(value, dict):
        return dict, tuple((_content(key), _content(entry)) for key, entry in value.items())
    if isinstance(value, pd.DataFrame):
        columns = tuple(zip(map(_content, value.columns), map(str, value.dtypes), strict=True))
        return columns, _digest(pd.util.hash_pandas_object(value).to_numpy()), _content(value.attrs)
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, _digest(value)
    name = getattr(value, "__qualname__", "<")
    if callable(value) and "<" not in name:  # neither a lambda nor made within another function
        return value.__module__, name
    raise TypeError(f"no content to compare: {type(value)}")


def _digest(values: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(values).tobytes(), digest_size=16).digest()
