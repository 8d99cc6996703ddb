"""The parts of pages: headings with data and code, figures, notes, rows of numbers, links, and error messages."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from twell.analysis.figures.style import CONFIG
from twell.analysis.memo import memoized
from twell.analysis.neurons.by_neuron import last_neuron
from twell.app.ui.formatting import marked_up, message_markdown, plural, typeset
from twell.app.ui.pages import PAGES
from twell.app.ui.query import QueryResult
from twell.app.ui.url_state import current_run, one_of, run_name, sync_url, url_param
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.part_files import ADVICE
from twell.workbench.run.store import Run

if TYPE_CHECKING:
    from pandas.io.formats.style import Styler

CHOSEN = "chosen-row"  # in the session state
LINKS = "links"  # the trace of points that lie on a heat map's cells
_beside_heading: ContextVar[Any] = ContextVar("beside_heading", default=None)  # free for the menu of the next figure


def title(question: str) -> None:
    """Draw the page's title, the question that it answers."""
    st.html(f'<h1 class="tw-title">{html.escape(question)}</h1>')


def note(markup: str, width: Any = "stretch") -> None:
    """Draw a quiet line of HTML."""
    st.html(f'<p class="tw-note">{markup}</p>', width=width)


def pair(key: str) -> tuple[DeltaGenerator, DeltaGenerator]:
    """Return two columns side by side, which stand one below the other on a narrow screen. key: of their container"""
    with st.container(key=key):
        return st.columns(2, gap="large")


def heading(name: str, caption: str = "", result: QueryResult | None = None, key: str = "") -> None:
    """Draw the title of a figure or table, and the buttons Data and Code beside it.

    Args:
        name: the title.
        caption: the line under it: units, n, how to read the figure.
        result: the table that the figure draws. Data shows and saves it, Code has the lines that make it in a notebook.
        key: names its buttons and files, where the title holds words of the text; from the title if empty.
    """
    key = key or name.lower().replace(" ", "-")
    with st.container(horizontal=True, wrap=False, vertical_alignment="bottom", gap="small"):
        line = f'<p class="tw-note">{html.escape(typeset(caption))}</p>' if caption else ""
        st.html(f'<div class="tw-figure"><h2>{html.escape(name)}</h2>{line}</div>', width="stretch")
        if result is not None:
            _data_and_code(result, key)
        _beside_heading.set(st.empty())


def _data_and_code(result: QueryResult, key: str) -> None:
    """Draw the buttons Data and Code of a table. key: what their keys begin with"""
    with st.popover("Data", type="tertiary", key=f"{key}-data", on_change=sync_url) as popover:
        if popover.open:
            table(result.frame, height=280, width=640)
            save_buttons(result.frame, f"{result.run.name}-{key}", key)
    with st.popover("Code", type="tertiary", key=f"{key}-code"):
        st.code(result.code, "python")


def save_buttons(table: pd.DataFrame | Callable[[], pd.DataFrame], file: str, key: str) -> None:
    """Draw buttons that save a table as CSV and as Parquet.

    Args:
        table: the table, or a function that makes it once a button is pressed.
        file: the file's name without its ending.
        key: what the keys of the buttons begin with.
    """

    def rows() -> pd.DataFrame:
        return table() if callable(table) else table

    def parquet() -> bytes:
        frame = rows().reset_index(drop=True)
        frame.attrs = {}  # Parquet's metadata cannot hold every value of it
        return bytes(frame.to_parquet(index=False))

    with st.container(horizontal=True, gap="small"):
        st.download_button(
            "Save as CSV",
            lambda: as_csv(rows()),
            f"{file}.csv",
            "text/csv",
            key=f"{key}-csv",
            on_click="ignore",
        )
        st.download_button(
            "Save as Parquet",
            parquet,
            f"{file}.parquet",
            "application/vnd.apache.parquet",
            key=f"{key}-parquet",
            on_click="ignore",
        )


def as_csv(frame: pd.DataFrame) -> bytes:
    """Return a table as CSV that loses nothing: half floats written as floats, lists as JSON."""
    columns = {}
    for name, column in frame.items():
        if column.dtype == "float16":
            columns[name] = column.astype("float32")
        elif len(column) and isinstance(column.iloc[0], list | np.ndarray):
            columns[name] = column.map(lambda entries: json.dumps([float(entry) for entry in entries]))
    return frame.assign(**columns).to_csv(index=False).encode()


def draw(figure: go.Figure, key: str, alt: str, wide: bool = False, **options: Any) -> Any:
    """Draw a figure, and the menu that saves and copies its picture: beside its heading, or else under the figure.

    Args:
        figure: the figure.
        key: its key in the session state.
        alt: a description for readers who do not see it.
        wide: whether it has panels or columns side by side, and therefore scrolls on a narrow screen.
        options: further arguments of `st.plotly_chart`.

    Returns:
        What was selected in the figure, if `on_select` is among the options.
    """
    with st.container(key=f"wide-{key}") if wide else nullcontext():
        event = st.plotly_chart(figure, theme=None, key=key, config=CONFIG, alt=alt, **options)
    beside = _beside_heading.get()
    (beside or st).html(picture_menu(run_name()), width="content" if beside else "stretch")
    _beside_heading.set(None)
    return event


def picture_menu(run: str) -> str:
    """Return the menu of a figure of this run, as HTML; the script of
    `server/pictures.py` does what its buttons say."""
    return (
        f'<details class="tw-picture" data-run="{html.escape(run, quote=True)}"><summary>Picture</summary><div>'
        '<button data-do="copy">Copy picture and address</button><button data-do="link">Copy address</button>'
        '<button data-do="png">Save PNG</button><button data-do="svg">Save SVG</button>'
        '<output aria-live="polite"></output></div></details>'
    )


def with_links(build: Callable[..., go.Figure], *tables: Any) -> go.Figure:
    """Return a heat map, `build(*tables)`, whose cells can be chosen: unseen points lie on them, and say what they say.

    Plotly selects points and bars, but no cells. The points are the last trace, named LINKS; their x and y are those of
    the cells. A click counts for the nearest point, however far: all cells being equal, that of the cell it is in.
    """
    figure = build(*tables)
    cells = next(trace for trace in figure.data if trace.type == "heatmap")
    rows, columns = np.shape(cells.z)
    figure.add_scatter(
        name=LINKS,
        x=np.tile(cells.x, rows),
        y=np.repeat(cells.y, columns),
        mode="markers",
        marker={"size": 1, "opacity": 0},  # larger ones would widen the axes
        customdata=np.reshape(cells.customdata, (rows * columns, *np.shape(cells.customdata)[2:])),
        hovertext=np.ravel(cells.hovertext),
        hovertemplate=cells.hovertemplate,
        showlegend=False,
    )
    figure.update_layout(hoverdistance=-1)
    return figure


@contextmanager
def show_errors() -> Iterator[None]:
    """Show the message of a Missing or UserError in place of what the block would have drawn."""
    try:
        yield
    except Missing as error:
        show_missing(str(error))
    except UserError as error:
        st.warning(message_markdown(str(error)))


def show_missing(reason: str) -> None:
    """Draw what a run lacks; of a damaged file once a page, however many of the page's parts need it."""
    if clause := damage_in(reason):
        _tell_damage(current_run(), clause)
    else:
        st.info(message_markdown(reason))


def damage_in(reason: str) -> str:
    """Return what a reason says of a damaged file, without the part of the page that it says it for; else nothing."""
    return reason.partition(": ")[2] if ADVICE[1:] in reason else ""


@memoized
def _tell_damage(run: Run, clause: str) -> None:
    st.warning(message_markdown(f"{run.name} is damaged, and what needs this file is left out: {clause}"))


def scanning(run: Run) -> AbstractContextManager[None]:
    """Show a spinner while the rows of single tokens are read: a second or more for ten million."""
    return st.spinner(f"Reading {plural(run.manifest.tokens, 'token')}")


def facts_html(facts: dict[str, str]) -> str:
    """Return terms and their descriptions as an HTML list, escaped; what stands in backquotes is set as code."""
    rows = "".join(f"<dt>{html.escape(name)}</dt><dd>{marked_up(text)}</dd>" for name, text in facts.items())
    return f'<dl class="tw-facts">{rows}</dl>'


def page_link(page: str, label: str, **parameters: Any) -> None:
    """Draw a link to a page about the same run.

    Args:
        page: the page's address, a key of PAGES.
        label: the text of the link.
        parameters: further query parameters.
    """
    query = {"run": run_name(), **{key: str(value) for key, value in parameters.items()}}
    st.page_link(PAGES[page].file, label=label, query_params=query)


def numbers(values: Sequence[tuple[str, ...]]) -> None:
    """Draw numbers in a row, each as (name, value, what it is a number of), and maybe more, which is folded."""
    cells = ""
    for name, value, about, *more in values:
        folded = "".join(f"<details><summary>more</summary>{html.escape(text)}</details>" for text in more)
        cells += (
            f"<div><dt>{html.escape(name)}</dt><dd><b>{html.escape(value)}</b><span>{html.escape(about)}</span>"
            f"{folded}</dd></div>"
        )
    st.html(f'<dl class="tw-numbers">{cells}</dl>')


def table(rows: pd.DataFrame | Styler, hide_index: bool = True, **look: Any) -> None:
    """Draw a table; what it lacks is a dash, as where a number stands alone.

    look: further options of `st.dataframe`
    """
    st.dataframe(rows, hide_index=hide_index, placeholder="–", **look)


def choosable(rows: pd.DataFrame, key: str, names: pd.Series, **look: Any) -> None:
    """Draw a table whose rows can be chosen, by a click on any cell; `chosen_row` tells which one was.

    Args:
        rows: the table.
        key: the widget's key.
        names: what each row is chosen as.
        look: further options of `st.dataframe`.
    """
    name_of_row = names.tolist()

    def choose() -> None:
        sync_url()
        selection = st.session_state[key].selection
        chosen = [*selection.rows, *(row for row, _ in selection.cells)]
        st.session_state[CHOSEN] = name_of_row[chosen[0]] if chosen else None

    table(rows, key=key, height=420, on_select=choose, selection_mode=["single-row", "single-cell"], **look)


def chosen_row() -> Any:
    """Return the name of the row of `choosable` that has just been chosen, once; None if none has.

    It is known before the page is drawn anew, which the visitor leaves.
    """
    return st.session_state.pop(CHOSEN, None)


def url_choice(label: str, names: dict[str, str], param: str, default: str, **look: Any) -> str:
    """Draw a row of buttons, one of which is chosen, and return the key of the chosen one.

    Args:
        label: what is chosen, in words.
        names: the text of each button by its key.
        param: the parameter of the address that carries the key.
        default: the key that is chosen where the address has none.
        look: further options of `st.segmented_control`.
    """
    look |= {"format_func": lambda key: names[key], "required": True, **url_param(param, default, one_of(names))}
    return str(st.segmented_control(label, list(names), **look))


def no_such_neuron(run: Run) -> None:
    """Draw a note under a field for a neuron's name that holds no such name."""
    note(f"No such neuron: the names of this run go from L0/N0 to {last_neuron(run)}.")
