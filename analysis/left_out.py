"""Name in an answer what its run is used without: `open_run(path, without_damaged=True)`.

Cost: nothing for a run that is used whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import pandas as pd

from twell.workbench.run.checks.left_out import ATTRIBUTE
from twell.workbench.run.store import Run

P = ParamSpec("P")
Answer = TypeVar("Answer")


def named(question: Callable[P, Answer]) -> Callable[P, Answer]:
    """Return a question whose answers name what their runs are used without.

    question: takes a run first, or a list of runs; of its answers, DataFrames and dicts name it
    """

    @functools.wraps(question)
    def ask(*args: P.args, **kwargs: P.kwargs) -> Answer:
        answer = question(*args, **kwargs)
        runs: Any = args[0] if args else None
        sentences = [run.left_out for run in ([runs] if isinstance(runs, Run) else _listed(runs)) if run.left_out]
        return _with(answer, " ".join(sentences)) if sentences else answer

    return ask


def _listed(runs: Any) -> list[Run]:
    """Return the runs in a list; none for anything else."""
    return [run for run in runs if isinstance(run, Run)] if isinstance(runs, list | tuple) else []


def _with(answer: Any, sentence: str) -> Any:
    """Return a DataFrame or a dict that has the sentence too, and anything else as it is."""
    if isinstance(answer, pd.DataFrame):
        answer.attrs[ATTRIBUTE] = sentence
    return {**answer, ATTRIBUTE: sentence} if isinstance(answer, dict) else answer
