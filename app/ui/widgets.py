"""What the pages are made of: the run's head, a figure with its heading, data and code, and the empty states."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from twell import analysis
from twell.app.ui.formatting import SPACE, number, plural, seconds_ago, typeset, whole
from twell.app.ui.pages import PAGES
from twell.app.ui.plot_style import CONFIG
from twell.app.ui.query import Answer
from twell.app.ui.url_state import MANIFEST, RECORDED, Shelf, digest, draw_anew, keep, opened
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run

LOOK = 0.3  # seconds between looks at a run that is being recorded, each of which takes a browser 0.06
STALE = 60.0  # seconds without a new part before a recording run is said to be silent; a part closes after 10


def note(markup: str, width: Any = "stretch") -> None:
    """A quiet line of HTML."""
    st.html(f'<p class="tw-note">{markup}</p>', width=width)


def title(question: str) -> None:
    """The page's question."""
    st.html(f'<h1 class="tw-title">{html.escape(question)}</h1>')


def heading(name: str, said: str = "", drawn: Answer | None = None) -> None:
    """The title of a figure or table; under it units, n and how to read it; beside it what it draws, as a table to look
    at or to save, and the lines that make that table in a notebook."""
    key = name.lower().replace(" ", "-")
    with st.container(horizontal=True, wrap=False, vertical_alignment="bottom", gap="small"):
        note = f'<p class="tw-note">{html.escape(typeset(said))}</p>' if said else ""
        st.html(f'<div class="tw-figure"><h3>{html.escape(name)}</h3>{note}</div>', width="stretch")
        if drawn is None:
            return
        with st.popover("Data", type="tertiary", key=f"{key}-data", on_change=keep) as popover:
            if popover.open:
                st.dataframe(drawn.frame, hide_index=True, height=280, width=640)
                save(drawn.frame, f"{drawn.run.name}-{key}", key)
        with st.popover("Code", type="tertiary", key=f"{key}-code"):
            st.code(drawn.code, "python")


def save(data: pd.DataFrame | Callable[[], pd.DataFrame], file: str, key: str) -> None:
    """Buttons that save a table, or what a function answers once it is asked, as CSV and as Parquet."""

    def rows() -> pd.DataFrame:
        return data() if callable(data) else data

    def parquet() -> bytes:
        table = rows().reset_index(drop=True)
        table.attrs = {}  # notes for the pages, which Parquet's metadata cannot hold in every case
        return bytes(table.to_parquet(index=False))

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
    """A table as CSV that loses nothing: half floats written out as floats, lists as JSON."""
    columns = {}
    for name, column in frame.items():
        if column.dtype == "float16":
            columns[name] = column.astype("float32")
        elif len(column) and isinstance(column.iloc[0], list | np.ndarray):
            columns[name] = column.map(lambda entries: json.dumps([float(entry) for entry in entries]))
    return frame.assign(**columns).to_csv(index=False).encode()


def draw(figure: go.Figure, key: str, alt: str, wide: bool = False, **options: Any) -> Any:
    """A figure, with `alt` for those who do not see it; a wide one has panels or columns side by side, and scrolls on a
    narrow screen. Returns what was chosen in it, where `on_select` is given."""
    with st.container(key=f"wide-{key}") if wide else nullcontext():
        return st.plotly_chart(figure, key=key, config=CONFIG, alt=alt, **options)


@contextmanager
def told() -> Iterator[None]:
    """Say what a run lacks, or what cannot be read, in place of what would have been shown."""
    try:
        yield
    except Missing as error:
        st.info(plain(str(error)))
    except UserError as error:
        st.warning(plain(str(error)))


def looking(run: Run) -> AbstractContextManager[None]:
    """Say so, while rows of single tokens are looked through: a second and more for ten million."""
    return st.spinner(f"Looking through {plural(run.manifest.tokens, 'token')}")


def bands(*runs: Run) -> str:
    """What the bands of a figure are, or why there are none."""
    if all(run.manifest.sequences > 1 for run in runs):
        return "bands are 95 % intervals"
    return "one sequence alone gives no intervals"


def plain(text: str) -> str:
    """Text for a place that reads Markdown, with nothing left to read in it."""
    return "".join("\\" + c if c in "\\`*_{}[]()#+-.!|<>~$:" else c for c in text)


def facts(run: Run) -> None:
    """What was run on what, in one line."""
    manifest = run.manifest
    said = [
        f"{run.layers} layers × {whole(manifest.model['d_model'])}, d_ff {whole(run.d_ff)}",
        f"{plural(manifest.tokens, 'token')} in {plural(manifest.sequences, 'sequence')}",
        f"{manifest.dtype} on {manifest.device}",
        f"{manifest.kernel['name']} kernel",
    ]
    line = f"<b>{html.escape(str(manifest.model['name']))}</b>"
    st.html(
        f'<div class="tw-head">{line}{"".join(f"<span>{html.escape(s)}</span>" for s in said)}</div>', width="stretch"
    )


def definition(run: Run) -> None:
    """The rule by which neurons were counted, and the terms that rest on it."""
    with st.popover("What is nnz?", type="tertiary", key="definition"):
        terms = {
            "nnz": f"how many of a layer's {whole(run.d_ff)} FFN neurons a token fires. Here a neuron fires when: "
            + run.manifest.nnz_definition.rstrip(".")
            + ".",
            "sparsity": "1 − mean nnz / d_ff.",
            "z": "nnz in standard deviations from its layer's mean, averaged over layers.",
            "dead": "never fired in the tokens counted here. That does not prove that a neuron never fires: it says "
            f"that its density is under 3 / tokens, with 95{SPACE}% confidence, were its tokens independent.",
            "left out": "special tokens, the first token of each sequence and tokens with a non-finite value, except "
            "where the first position is shown by itself.",
        }
        st.html(
            '<dl class="tw-facts">'
            + "".join(f"<dt>{k}</dt><dd>{html.escape(v)}</dd>" for k, v in terms.items())
            + "</dl>"
        )


def status(run: Run) -> None:
    """What is missing from a run that is not whole, in words."""
    if run.manifest.status == "recording":
        follow(str(run.path), digest(run))
    elif run.manifest.status == "interrupted":
        note(
            f'<span class="tw-mark">interrupted</span> The capture stopped before its end. What is shown covers the '
            f"{plural(run.manifest.tokens, 'token')} recorded until then, and only those."
        )
    if run.manifest.summary_only:
        note(
            '<span class="tw-mark">summary only</span> This run keeps sums, counts and timings, and no row of single '
            "tokens: it cannot show where in the text a token stands."
        )


@st.fragment(run_every=LOOK)
def follow(path: str, seen: str) -> None:
    """The state of a run that is being recorded, looked at again and again; a new part draws the page anew."""
    try:
        run = opened(Path(path))
        age = time.time() - (Path(path) / MANIFEST).stat().st_mtime
    except (UserError, OSError):
        draw_anew()
    if digest(run) != seen:
        draw_anew()
    if age > STALE:
        said = f"last part {seconds_ago(age)}: was the capture killed? What it wrote is shown."
        mark = '<span class="tw-mark">recording</span>'
    else:
        said = f"last part {seconds_ago(age)}; the page follows."
        mark = '<span class="tw-mark live">recording</span>'
    note(f"{mark} {plural(run.manifest.tokens, 'token')} so far, {said}")


def summarise(run: Run) -> None:
    """Bring the run's summaries up to date, with a bar where that takes a while. Nothing where there is nothing yet."""
    place, done, began = st.empty(), 0, time.monotonic()

    def tick(tokens: int) -> None:
        nonlocal done
        done += tokens
        if time.monotonic() - began > 0.5:
            share = min(done / max(run.manifest.tokens, 1), 1.0)
            place.progress(share, f"Summarising {plural(run.manifest.tokens, 'token')}, once for this run")

    try:
        analysis.ensure(run, tick)
    except Missing:
        pass  # each figure says for itself what the run lacks
    finally:
        place.empty()


def run_label(name: str, found: Shelf) -> str:
    """A run in the list of runs."""
    run = found.runs.get(name)
    if run is None:
        return name
    state = "" if run.manifest.status == "complete" else f" · {run.manifest.status}"
    state += " · summary only" if run.manifest.summary_only else ""
    return (f"{run.name} (recorded with the package)" if name.startswith(RECORDED) else run.name) + state


def linked(page: str, label: str, **parameters: Any) -> None:
    """Draw a link to a page, by its address, about the same run."""
    query = {"run": st.session_state["run"], **{k: str(v) for k, v in parameters.items()}}
    st.page_link(PAGES[page].file, label=label, query_params=query)


def numbers(values: Sequence[tuple[str, str, str]]) -> None:
    """Numbers in a row: what each is called, its value, and what it is of."""
    cells = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd><b>{html.escape(value)}</b><span>{html.escape(said)}</span></dd></div>"
        for name, value, said in values
    )
    st.html(f'<dl class="tw-numbers">{cells}</dl>')


def no_such_neuron(run: Run) -> None:
    """Under a field for a neuron's name that was given another."""
    note(f"No such neuron: it takes a name from L0/N0 to L{run.layers - 1}/N{run.d_ff - 1}.")


def nats(value: float) -> str:
    """A loss with its unit."""
    said = number(value)
    return said if said == "–" else f"{said} nats"
