"""What a figure draws and the lines that make it in a notebook, out of one question: so the two cannot differ.

    found = answer(run, "by_token", min_count=5).then(searched, "text", "ing")
    found.frame   # the rows drawn: what Data shows and saves
    found.code    # the same calls, as Code shows them

`parts.heading` takes its table as an Answer and as nothing else. Questions and steps are functions that a notebook can
import. Cost: none until the frame is asked for, then that of the question, once for as long as the run stands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pandas as pd

from twell import analysis
from twell.app.runs.comparison import against
from twell.app.ui.url_state import ask
from twell.workbench.run.store import Run

Step = tuple[Callable[..., pd.DataFrame], tuple[Any, ...]]


@dataclass(frozen=True)
class Answer:
    """A question put to a run, or (with `others`, which come before it) to several, and what is done to the table that
    comes back."""

    run: Run
    question: str | Callable[..., Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    others: tuple[Run, ...] = ()
    steps: tuple[Step, ...] = ()
    before: Answer | None = field(default=None, repr=False, compare=False)  # it without its last step

    def then(self, step: Callable[..., pd.DataFrame], *arguments: Any) -> Answer:
        """The same with a step more: a function of the table and of these arguments, the run itself among them."""
        return replace(self, steps=(*self.steps, (step, arguments)), before=self)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """The table, its rows numbered from 0. Raises Missing and UserError as `ask` does."""
        if self.before is not None:
            step, arguments = self.steps[-1]
            found = step(self.before.frame, *arguments)
        elif self.others:
            found = against(self.run, self.question, list(self.others))
        else:
            found = ask(self.run, self.question, **self.arguments)
        return found.reset_index(drop=True)

    @property
    def code(self) -> str:
        """The lines that make the table, its imports first."""
        functions = [f for f in (self.question, *(step for step, _ in self.steps)) if callable(f)]
        imports = {f"from {f.__module__} import {f.__qualname__}" for f in functions}
        imports.add("from twell.workbench import open_run")
        if isinstance(self.question, str):
            imports.add(f"from {analysis.__name__.rpartition('.')[0]} import analysis")
        lines = [f"run = {self._said(self.run, opened=True)}"]
        if self.others:
            lines.append(f"runs = [{', '.join(map(self._said, self.others))}, run]")
        calls = [self._call(self.question, "runs" if self.others else "run", (), self.arguments)]
        calls += [self._call(step, "table", arguments, {}) for step, arguments in self.steps]
        lines += [f"table = {call}" for call in calls[:-1]]
        return "\n".join([*sorted(imports), "", *lines, calls[-1]])

    def _call(
        self, function: str | Callable[..., Any], first: str, more: tuple[Any, ...], named: dict[str, Any]
    ) -> str:
        name = function.__qualname__ if callable(function) else f"analysis.{function}"
        given = [first, *map(self._said, more), *(f"{key}={self._said(value)}" for key, value in named.items())]
        return f"{name}({', '.join(given)})"

    def _said(self, value: Any, opened: bool = False) -> str:
        """A value as a notebook writes it."""
        if not isinstance(value, Run):
            return repr(value)
        return "run" if value is self.run and not opened else f"open_run({str(value.path)!r})"


def answer(run: Run, question: str | Callable[..., Any], **arguments: Any) -> Answer:
    """What `twell.analysis`, or a function that takes the run first, answers about a run."""
    return Answer(run, question, arguments)


def together(question: str | Callable[..., Any], others: list[Run], run: Run) -> Answer:
    """What a function of a list of runs answers about the others and this run, which comes last."""
    return Answer(run, question, others=tuple(others))
