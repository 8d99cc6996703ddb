"""What every question about a run has in common: it checks what it is asked with, and names what a run lacks.

Several runs are given in a list or one after another, to every question that takes several.

Each argument is checked at the call by its declared type, and numbers by their bounds: a wrong one would else fail deep
inside, as a file that cannot be read, or be answered as if another had been asked. An answer about a run that is used
without its damaged parts, `open_run(path, without_damaged=True)`, names them. Its columns of places
(layers, neurons, sequences, positions) have the type that a run's own tables have, so that tables can be joined and
compared. Cost: some 10 µs a question, 0.2 ms where such a column is turned into that type.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter
from itertools import takewhile
from typing import Any, ParamSpec, TypeVar, get_args, get_type_hints

import pandas as pd

from twell.workbench.errors import UserError
from twell.workbench.option_fields import check_type
from twell.workbench.run.checks.left_out import ATTRIBUTE
from twell.workbench.run.store import Run

P = ParamSpec("P")
Answer = TypeVar("Answer")
ONE, SEVERAL = "run", "runs"  # what questions call their first argument
PLACES = (  # columns of places in a model or a text, and of tokens of its vocabulary; a run has them as int32
    *("layer", "neuron", "token_id", "document", "sequence", "first_sequence"),
    *("position", "position_from", "position_to"),
)
LEAST = {"limit": 1, "width": 0, "min_count": 1, "min_fires": 1, "lags": 1, "windows": 1}


def asked(question: Callable[P, Answer]) -> Callable[P, Answer]:
    """Return a question whose answers name what their runs are used without, and number places by one type.

    question: takes a run first, or a list of runs; of its answers, DataFrames and dicts name what is left out
    It raises UserError for an argument that the question cannot be asked with.
    """
    signature = inspect.signature(question)

    @functools.wraps(question)
    def ask(*args: P.args, **kwargs: P.kwargs) -> Answer:
        try:
            bound = signature.bind_partial(*_in_one_list(signature, args), **kwargs)
        except TypeError as error:  # it does not say of which function
            raise TypeError(f"{question.__name__}: {error}") from None
        given = bound.arguments
        given.update(_plain(given))
        _check(question, given)
        answer = with_places(question(*bound.args, **bound.kwargs))
        first = given.get(ONE, given.get(SEVERAL))
        runs = first if isinstance(first, list | tuple) else [first]
        sentences = [run.left_out for run in runs if isinstance(run, Run) and run.left_out]
        return _with(answer, " ".join(sentences)) if sentences else answer

    return ask


def _in_one_list(signature: inspect.Signature, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments by position with runs that were given one after another in a list, if the question takes one."""
    runs = list(takewhile(lambda one: isinstance(one, Run), args))
    return (runs, *args[len(runs) :]) if SEVERAL in signature.parameters and len(runs) > 1 else args


def with_places(answer: Any) -> Any:
    """Return a DataFrame with its PLACES as int32, which a run's tables have; anything else as it is."""
    if not isinstance(answer, pd.DataFrame):
        return answer
    wide = [name for name in PLACES if name in answer and answer[name].dtype == "int64"]
    return answer.astype(dict.fromkeys(wide, "int32")) if wide else answer


def _with(answer: Any, sentence: str) -> Any:
    """Return a DataFrame or a dict that has the sentence too, and anything else as it is."""
    if isinstance(answer, pd.DataFrame):
        answer.attrs[ATTRIBUTE] = sentence
    return {**answer, ATTRIBUTE: sentence} if isinstance(answer, dict) else answer


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by name with scalars and arrays of NumPy, pandas and torch as Python's."""
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in given.items()}


def _check(question: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise UserError for the first argument that the question cannot be asked with. given: arguments by name"""
    declared = _declared(question)
    for name, value in given.items():
        kind, is_rest = declared[name]
        if name == SEVERAL:
            _check_runs(question.__name__, value)
        elif Run in (kind, *get_args(kind)):
            others = tuple(one for one in get_args(kind) if isinstance(one, type) and one is not Run)  # None, options
            takes_list = Sequence[Run] in get_args(kind) and isinstance(value, list | tuple)
            for run in value if is_rest or takes_list else [value]:
                if not isinstance(run, others):
                    _check_run(run)
        else:
            check_type(name, value, kind)
            if name in LEAST:
                _check_least(name, value)


@functools.cache
def _declared(question: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """Return by argument its type, and whether it takes all that are left."""
    kinds = get_type_hints(question)
    parameters = inspect.signature(question).parameters.values()
    return {one.name: (kinds[one.name], one.kind is Parameter.VAR_POSITIONAL) for one in parameters}


def _check_run(run: Any) -> None:
    """Raise UserError for what is no run."""
    if isinstance(run, list | tuple):
        raise UserError("Expected a run, got several in a list: ask for each of them.")
    if not isinstance(run, Run):
        raise UserError(f"Expected a run, got a {type(run).__name__}: open it first, as in open_run('runs/mine').")


def _check_runs(question: str, runs: Any) -> None:
    """Raise UserError for what is no list of runs."""
    if isinstance(runs, Run):
        raise UserError(f"Expected runs in a list, got one run: put them in one, as in {question}([first, other]).")
    for run in runs if isinstance(runs, list | tuple) else [runs]:
        _check_run(run)


def _check_least(name: str, value: Any) -> None:
    """Raise UserError for a number, or one in a list, that is below the least that such an argument takes."""
    for number in value if isinstance(value, Sequence) else [value]:
        if number < LEAST[name]:
            raise UserError(f"Expected {name}= of at least {LEAST[name]}, got {number}.")
