"""A question on a page: a table of the API, its figure, and one paragraph that says what it means.

The figure is that of the exported notebook (`analysis.plots`), dressed for both themes. Questions that the run cannot
answer have no heading: one line under all of them names them, and what each lacks. A question that reads every token's
row is asked at once of short runs, and of others when its button is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from twell.analysis.figures.table_plots.base import dressed
from twell.analysis.memo import built_once
from twell.app.ui import widgets
from twell.app.ui.formatting import marked_up, plural, with_intervals
from twell.app.ui.query import Query, query
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

LONG = 30_000_000  # counts (tokens times layers) from which rows are read only when asked for
MANY = 300_000  # the same of runs whose sampled firings are read only when asked for


@dataclass(frozen=True)
class Question:
    """A question on a page.

    Attributes:
        title: above the figure.
        query: what makes its table.
        plot: draws the table; one of `analysis.plots`.
        meaning: one paragraph: what is drawn, how to read it, what follows. {intervals} stands for what the
            table says of them, in a question that is asked at once.
        reads_rows: whether the table comes from every token's row, which takes a while in a long run.
        reads_firings: whether it comes from the sampled firings, which takes longer.
        several: a column that must have several values, as one source cannot be compared with others.
    """

    title: str
    query: Query
    plot: Callable[[pd.DataFrame], go.Figure]
    meaning: str
    reads_rows: bool = False
    reads_firings: bool = False
    several: str = ""

    def said(self, table: pd.DataFrame) -> str:
        """Return the meaning of the question's table, with or without intervals."""
        ends = next((table[name] for name in ("ratio_low", "low") if name in table), pd.Series(dtype=float))
        return self.meaning.replace("{intervals}", with_intervals(ends))


def draw_questions(run: Run, questions: Sequence[Question], lacking: dict[str, list[str]] | None = None) -> None:
    """Draw each question's figure and what it means, and one line that names those which this run cannot answer.

    lacking: titles of further parts of the page that it cannot draw, by what the run lacks
    """
    lacking = {} if lacking is None else lacking
    for question in questions:
        with noted(question.title, lacking):
            draw_question(run, question)
    say_left_out(run, lacking)


@contextmanager
def noted(title: str, lacking: dict[str, list[str]]) -> Iterator[None]:
    """Note a part of a page that a run cannot draw. lacking: the titles of such parts, by what the run lacks"""
    try:
        yield
    except Missing as reason:
        lacking.setdefault(str(reason), []).append(title)


def say_left_out(run: Run, lacking: dict[str, list[str]]) -> None:
    """Draw one line that names the parts which the run cannot draw; nothing where there are none."""
    for reason in filter(widgets.damage_in, lacking):
        widgets.show_missing(reason)
    if lacking:
        widgets.note(marked_up(left_out(run, lacking)))


def left_out(run: Run, lacking: dict[str, list[str]]) -> str:
    """Return why figures are left out: a visitor of a summary-only run cannot mend it, of others the reason says how.

    lacking: the figures' titles, by what the run lacks
    """
    if run.manifest.summary_only:
        titles = [title for several in lacking.values() for title in several]
        return f"Left out, as this summary of a run does not keep what they need: {_listed(titles)}."
    by_reason: dict[str, list[str]] = {}
    for reason, titles in lacking.items():  # a damaged file is told of above, once for all that it leaves out
        by_reason.setdefault("" if widgets.damage_in(reason) else reason, []).extend(titles)
    return " ".join(f"Left out: {_listed(titles)}. {reason}" for reason, titles in by_reason.items()).rstrip()


def _listed(titles: Sequence[str]) -> str:
    return "; ".join(title[0].lower() + title[1:] for title in titles)


def draw_question(run: Run, question: Question) -> None:
    """Draw a question's figure and what it means; where this run cannot answer it, raise Missing with nothing drawn."""
    key = question.title.lower().replace(" ", "-")
    heading = st.container()
    counts = run.manifest.tokens * run.layers * (LONG // MANY if question.reads_firings else 1)
    can_read = not run.manifest.summary_only if question.reads_rows else question.reads_firings and run.has("fired")
    if can_read and counts > LONG and not st.session_state.get(f"asked-{key}"):
        with heading:
            widgets.heading(question.title, question.meaning)
        label = f"Read {plural(run.manifest.tokens, 'token')} for it"
        st.button(label, key=f"ask-{key}", on_click=_ask, args=(f"asked-{key}",))
        return
    result = query(run, question.query)
    with widgets.scanning(run):
        table = result.frame
    if question.several and table[question.several].nunique() < 2:
        return
    if table.empty:
        raise Missing("There is nothing of the kind in this run.")
    figure = built_once(dressed_plot, question.plot, table)
    with heading:
        widgets.heading(question.title, question.said(table), result)
    widgets.draw(figure, key, question.title, wide=True)


def dressed_plot(plot: Callable[[pd.DataFrame], go.Figure], table: pd.DataFrame) -> go.Figure:
    """Return a table's plot in the dashboard's style. plot: one of `analysis.plots`."""
    return dressed(plot(table))


def _ask(key: str) -> None:
    st.session_state[key] = True
