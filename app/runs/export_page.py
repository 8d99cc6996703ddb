"""Page Export: the whole run, and each computed or recorded table, as files that other tools read."""

from __future__ import annotations

import html
import io
import re
import shlex
import tempfile
import zipfile
from pathlib import Path

import pandas as pd
import pyarrow as pa
import streamlit as st

from twell.analysis.exports.documents.notebook import notebook
from twell.analysis.exports.documents.report import page as html_page
from twell.analysis.exports.tables import ANALYSIS
from twell.app.ui import widgets
from twell.app.ui.formatting import number, plural, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import current_run, one_of, url_param
from twell.workbench.errors import Missing
from twell.workbench.run.part_files import open_part, unreadable_part
from twell.workbench.run.schema import TABLES, expand
from twell.workbench.run.store import Run

RECORDED = "recorded: "
SHOWN_ROWS = 200  # of a table
MAX_SAVED_ROWS = 2_000_000  # of a recorded table; a larger one would not fit a browser


def chosen_table(run: Run) -> str:
    """Draw the choice of a table; return its name, which begins with RECORDED for a recorded table."""
    recorded = [RECORDED + name for name in TABLES if run.has(name)]
    alone = run.manifest.only_trains and bool(recorded)
    names, first = (recorded, recorded[0]) if alone else ([*ANALYSIS, *recorded], "by_layer")
    return str(st.selectbox("Table", names, width=320, **url_param("table", first, one_of(names))))


def docstring_html(docstring: str | None) -> str:
    """Return a docstring as one paragraph of HTML, with the names in backquotes set as code."""
    said = " ".join((docstring or "").split()).removeprefix("Return ").rstrip(".") + "."
    text = html.escape(said[:1].upper() + said[1:])
    return re.sub("`([^`]+)`", r"<code>\1</code>", text)


def row_count(rows: int) -> str:
    """Return how many rows a table has, and how many of them are shown."""
    return plural(rows, "row") + (f" (first {whole(SHOWN_ROWS)} shown)" if rows > SHOWN_ROWS else "")


def draw_computed(run: Run, name: str) -> None:
    """Draw a table of `twell.analysis`, by the name of its function, with buttons to save it."""
    result = query(run, ANALYSIS[name])
    frame = result.frame
    note = str(frame.attrs.get("note", "")).rstrip(".")
    widgets.heading(name, f"{row_count(len(frame))}. {note}{'.' * bool(note)}", result)
    widgets.save_buttons(frame, f"{run.name}-{name}", "table")
    widgets.table(frame.head(SHOWN_ROWS))
    widgets.note(docstring_html(ANALYSIS[name].__doc__))


def draw_recorded(run: Run, name: str) -> None:
    """Draw a recorded table, with buttons to save it and the meaning of its columns."""
    parts = [part for part in run.manifest.parts if part.table == name]
    rows, size = sum(part.rows for part in parts), sum(part.bytes for part in parts)
    widgets.heading(
        name,
        f"A row is {TABLES[name].grain}. {row_count(rows)}; {plural(len(parts), 'file')}, {number(size / 1e6, 2)} MB "
        "of Parquet in the run's folder.",
    )
    if rows <= MAX_SAVED_ROWS:
        widgets.save_buttons(lambda: with_hex_bytes(run.frame(name)), f"{run.name}-{name}", "table")
    else:
        widgets.note(
            f"The table has more than {whole(MAX_SAVED_ROWS)} rows, too many for a browser. The files in the run's "
            f"folder are Parquet already; <code>twell export … --table {name} --format csv</code> writes them as CSV."
        )
    widgets.table(head(run, name))
    columns = [vars(column) for column in expand(TABLES[name], run.layers, run.d_ff, run.manifest.counts_used)]
    widgets.table(
        pd.DataFrame(columns)[["name", "type", "unit", "meaning"]].rename(columns={"name": "column"}),
        column_config={"meaning": st.column_config.TextColumn("meaning", width="large")},
    )


def head(run: Run, name: str) -> pd.DataFrame:
    """Return the first SHOWN_ROWS rows of a recorded table, without reading the rest."""
    path = run.parts(name)[0]
    try:
        batch = next(open_part(path).iter_batches(SHOWN_ROWS), None)
    except (OSError, pa.ArrowException) as error:
        raise unreadable_part(path, error) from None
    return with_hex_bytes(batch.to_pandas()) if batch is not None else pd.DataFrame()


def with_hex_bytes(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a table with its column `bytes` in hexadecimal digits, which CSV and a browser can hold."""
    return frame.assign(bytes=[piece.hex() for piece in frame["bytes"]]) if "bytes" in frame else frame


def document(run: Run, kind: str) -> bytes:
    """Return the run as a notebook (`kind` ipynb) or as one HTML page (html)."""
    with tempfile.TemporaryDirectory(prefix="twell-") as folder:
        path = Path(folder) / f"{run.name}.{kind}"
        if kind == "ipynb":
            notebook(run, path, where=str(run.path.absolute()))
        else:
            html_page(run, path)
        return path.read_bytes()


def every_table(run: Run) -> bytes:
    """Return a ZIP archive with every table of `twell.analysis` that the run has the data for, as Parquet."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in ANALYSIS:
            try:
                table = fetch(run, ANALYSIS[name]).reset_index(drop=True)
            except Missing:
                continue
            table.attrs = {}
            archive.writestr(f"{run.name}/{name}.parquet", table.to_parquet(index=False))
    return buffer.getvalue()


def draw_whole_run(run: Run) -> None:
    """Draw the buttons that save the whole run."""
    widgets.heading(
        "The whole run",
        "As a notebook that has run, its figures also as images, which takes some seconds to a minute; as one "
        "self-contained HTML page with the same sections; or as Parquet files, one for each computed table below.",
    )
    with st.container(horizontal=True, gap="small"):
        for label, kind, mime, make in (
            ("Save as notebook", "ipynb", "application/x-ipynb+json", lambda: document(run, "ipynb")),
            ("Save as one page", "html", "text/html", lambda: document(run, "html")),
            ("Save every table", "zip", "application/zip", lambda: every_table(run)),
        ):
            st.download_button(label, make, f"{run.name}.{kind}", mime, key=f"whole-{kind}", on_click="ignore")


def draw_commands(run: Run) -> None:
    """Draw the commands and the lines of Python that export the same."""
    widgets.heading("From a shell or a notebook")
    path = str(run.path.absolute())
    formats = {} if run.manifest.only_trains else {"notebook": "ipynb", "html": "html"}
    options = [
        "--out tables",
        *(f"--format {kind} --out {shlex.quote(f'{run.name}.{ending}')}" for kind, ending in formats.items()),
    ]
    st.code("\n".join(f"twell export {shlex.quote(path)} {option}" for option in options), "bash")
    imports, lines = "from twell import analysis\n", ["analysis.by_token(run)"]
    if run.manifest.only_trains:
        imports, lines = "", ['run.frame("training")']
    elif run.has("activity"):
        lines += ["run.activity(tidy=True)", 'run.sql("select count(*) from activity")']
    opened = f"from twell.workbench import open_run\n\nrun = open_run({path!r})\n"
    st.code(imports + opened + "\n".join(lines), "python")


def draw_page(run: Run) -> None:
    """Draw the buttons for the whole run, one table, and the commands; of a training, the tables that it records."""
    if not run.manifest.only_trains:
        with widgets.show_errors():
            draw_whole_run(run)
    name = chosen_table(run)
    with st.container(key="one"), widgets.show_errors():
        if name.startswith(RECORDED):
            draw_recorded(run, name.removeprefix(RECORDED))
        else:
            draw_computed(run, name)
    draw_commands(run)


widgets.title("Export this run")
draw_page(current_run())
