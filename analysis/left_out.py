"""What every question about a run has in common: it is asked of a run, and names what that is used without.

Without: `open_run(path, without_damaged=True)`. Cost: nothing for a run that is used whole.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import pandas as pd

from twell.workbench.errors import UserError
from twell.workbench.run.checks.left_out import ATTRIBUTE
from twell.workbench.run.store import Run

P = ParamSpec("P")
Answer = TypeVar("Answer")
FIRST = ("run", "runs")  # what questions call their first argument


def named(question: Callable[P, Answer]) -> Callable[P, Answer]:
    """Return a question whose answers name what their runs are used without.

    question: takes a run first, or a list of runs; of its answers, DataFrames and dicts name it
    It raises UserError for a path, or None, in the place of a run.
    """
    parameters = inspect.signature(question).parameters
    first = next((name for name in parameters if name in FIRST), "")
    needs_run = bool(first) and parameters[first].default is not None

    @functools.wraps(question)
    def ask(*args: P.args, **kwargs: P.kwargs) -> Answer:
        given: Any = args[0] if args else kwargs.get(first)
        runs = given if isinstance(given, list | tuple) else [given]
        for run in runs if first else ():
            if isinstance(run, str | os.PathLike) or (run is None and needs_run):
                kind = type(run).__name__
                raise UserError(f"Expected a run, got a {kind}: open it first, as in open_run('runs/mine').")
        answer = question(*args, **kwargs)
        sentences = [run.left_out for run in runs if isinstance(run, Run) and run.left_out]
        return _with(answer, " ".join(sentences)) if sentences else answer

    return ask


def _with(answer: Any, sentence: str) -> Any:
    """Return a DataFrame or a dict that has the sentence too, and anything else as it is."""
    if isinstance(answer, pd.DataFrame):
        answer.attrs[ATTRIBUTE] = sentence
    return {**answer, ATTRIBUTE: sentence} if isinstance(answer, dict) else answer
