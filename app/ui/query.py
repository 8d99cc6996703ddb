"""Queries on a run: a result is computed once for as long as the run stands, and tells how to make it in a notebook.

    result = query(run, analysis.by_token, min_count=5).then(matching, "text", "ing")
    result.frame   # the rows drawn: what Data shows and saves
    result.code    # the same calls, as Code shows them

A query is a function that takes a run first, and its other arguments. `widgets.heading` takes the table of a figure as
a QueryResult and as nothing else, so Data, Code and the figure cannot differ; that is why every function, `then`'s
included, must be one that a notebook can import. Cost: nothing until the frame is used, then one call of the function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import pandas as pd
import streamlit as st

from twell import analysis
from twell.app.ui.run_cache import digest
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run

Function = Callable[..., Any]  # takes a run (or several, as a list) first
Step = tuple[Callable[..., pd.DataFrame], tuple[Any, ...]]


@dataclass(frozen=True)
class Query:
    """A function and the arguments that follow the run.

    A page's data module lists what the page asks for first, in `DEFAULT_QUERIES`: the page itself and `warm_up`, which
    computes the results beforehand, use the same objects, so that one finds what the other has cached.
    """

    function: Function
    arguments: dict[str, Any] = field(default_factory=dict)

    def where(self, **arguments: Any) -> Query:
        """Return the query with some arguments replaced."""
        return replace(self, arguments=self.arguments | arguments)


@st.cache_data(max_entries=256, show_spinner=False)
def _cached(runs: list[tuple[str, str]], name: str, arguments: dict[str, Any], _compute: Callable[[], Any]) -> Any:
    """Return what `_compute` returns, cached by the other arguments (Streamlit does not hash a name that begins with
    an underscore): path and digest of each run, the function's full name, its arguments."""
    return _compute()


def fetch(run: Run, query: Query | Function, **arguments: Any) -> Any:
    """Return a query's result, cached until the run changes.

    Args:
        run: the run to query.
        query: a query, or a function that takes the run first.
        arguments: the function's other arguments, by name; they replace those of the query.

    Raises Missing if the run lacks what the function needs, UserError if one of its files cannot be read.
    """
    full_query = _as_query(query, arguments)
    return _fetch([run], full_query, lambda: full_query.function(run, **full_query.arguments))


def fetch_of_runs(runs: Sequence[Run], query: Query | Function, **arguments: Any) -> Any:
    """Return the result of a function that takes a list of runs first, cached until one of them changes."""
    full_query = _as_query(query, arguments)
    return _fetch(runs, full_query, lambda: full_query.function(list(runs), **full_query.arguments))


def _as_query(query: Query | Function, arguments: dict[str, Any]) -> Query:
    return (query if isinstance(query, Query) else Query(query)).where(**arguments)


def _fetch(runs: Sequence[Run], query: Query, compute: Callable[[], Any]) -> Any:
    """Return the cached result of `compute`, which calls the query on these runs."""
    name = f"{query.function.__module__}.{query.function.__qualname__}"
    arguments = _defaults(query.function) | query.arguments  # so that a default that is spelled out is no other query
    try:
        return _cached([(str(run.path), digest(run)) for run in runs], name, arguments, compute)
    except OSError as error:
        raise UserError(
            f"Expected the files of {runs[-1].name} to stay in place, got {error.strerror or error}: was the run moved "
            "or deleted? Choose another, or reload the page."
        ) from None


@lru_cache(maxsize=256)
def _defaults(function: Function) -> dict[str, Any]:
    """Return the function's default arguments by name."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


@dataclass(frozen=True)
class QueryResult:
    """The table that a query makes, and what is done to it before it is drawn.

    Attributes:
        run: the run that is shown.
        query: what is computed.
        others: further runs; if there are any, the function takes them and then `run`, in one list.
        steps: functions that take the table first, in order, with their other arguments.
        before: the result without the last step.
    """

    run: Run
    query: Query
    others: tuple[Run, ...] = ()
    steps: tuple[Step, ...] = ()
    before: QueryResult | None = field(default=None, repr=False, compare=False)

    def then(self, step: Callable[..., pd.DataFrame], *arguments: Any) -> QueryResult:
        """Return the result with one more step: a function of the table and of these arguments, the run among them if
        it needs it."""
        return replace(self, steps=(*self.steps, (step, arguments)), before=self)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The table, its rows numbered from 0. Raises Missing and UserError as `fetch` does."""
        if self.before is not None:
            step, arguments = self.steps[-1]
            frame = step(self.before.frame, *arguments)
        elif self.others:
            frame = fetch_of_runs([*self.others, self.run], self.query)
        else:
            frame = fetch(self.run, self.query)
        return frame.reset_index(drop=True)

    @property
    def known(self) -> bool:
        """Whether the run has what the table is made of."""
        try:
            return self.frame is not None
        except Missing:
            return False

    @property
    def code(self) -> str:
        """The lines of Python that make the table, imports first."""
        imports = {_import_of(function) for function in (self.query.function, *(step for step, _ in self.steps))}
        imports.add("from twell.workbench import open_run")
        lines = [f"run = {_open_run(self.run)}"]
        if self.others:
            lines.append(f"runs = [{', '.join(map(_open_run, self.others))}, run]")
        calls = [self._call(self.query.function, "runs" if self.others else "run", (), self.query.arguments)]
        calls += [self._call(step, "table", arguments, {}) for step, arguments in self.steps]
        lines += [f"table = {call}" for call in calls[:-1]]
        return "\n".join([*sorted(imports), "", *lines, calls[-1]])

    def _call(self, function: Function, first: str, positional: tuple[Any, ...], named: dict[str, Any]) -> str:
        """Return a call as a notebook writes it."""
        name = f"analysis.{function.__name__}" if _is_public(function) else function.__qualname__
        arguments = [first, *map(self._literal, positional), *(f"{k}={self._literal(v)}" for k, v in named.items())]
        return f"{name}({', '.join(arguments)})"

    def _literal(self, value: Any) -> str:
        """Return an argument as a notebook writes it."""
        if not isinstance(value, Run):
            return repr(value)
        return "run" if value is self.run else _open_run(value)


def _is_public(function: Function) -> bool:
    """Return whether a function is one of `twell.analysis`' public names."""
    public = getattr(analysis, function.__name__, None)
    return public is not None and inspect.unwrap(public) is inspect.unwrap(function)


def _import_of(function: Function) -> str:
    if _is_public(function):
        return f"from {analysis.__name__.rpartition('.')[0]} import analysis"
    return f"from {function.__module__} import {function.__qualname__}"


def _open_run(run: Run) -> str:
    return f"open_run({str(run.path)!r}{', without_damaged=True' if run.left_out else ''})"


def query(run: Run, function: Query | Function, **arguments: Any) -> QueryResult:
    """Return the table of a query on a run, not yet computed. For the arguments see `fetch`."""
    return QueryResult(run, _as_query(function, arguments))


def query_with_others(run: Run, others: Sequence[Run], function: Query | Function) -> QueryResult:
    """Return the table of a function that takes a list of runs: the others, then this run, which is shown."""
    return QueryResult(run, _as_query(function, {}), others=tuple(others))
