"""Export: every table computed from the run, and every table it recorded, as files that other tools read."""

from __future__ import annotations

import html
import io
import re
import tempfile
import zipfile
from pathlib import Path

import pandas as pd
import pyarrow as pa
import streamlit as st

from twell.analysis.exports.document import notebook
from twell.analysis.exports.document import page as html_page
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
SEEN = 200  # rows of a table that are shown
MOST = 2_000_000  # rows of a recorded table that are saved from here


def chosen(run: Run) -> str:
    """A table of the analysis or of the run, carried by the address."""
    names = [*ANALYSIS, *(RECORDED + name for name in TABLES if run.has(name))]
    return str(st.selectbox("Table", names, width=320, **url_param("table", "by_layer", one_of(names))))


def described(text: str | None) -> str:
    """What a table of the analysis holds, by the docstring of its function, as HTML."""
    said = html.escape(" ".join((text or "").split()).rstrip(".") + ".")
    return re.sub("`([^`]+)`", r"<code>\1</code>", said)


def computed(run: Run, name: str) -> None:
    """A table computed from the run, by the function of the same name."""
    result = query(run, ANALYSIS[name])
    frame = result.frame
    said = f"{plural(len(frame), 'row')}{', the first ' + whole(SEEN) + ' shown' if len(frame) > SEEN else ''}"
    note = str(frame.attrs.get("note", "")).rstrip(".")
    widgets.heading(name, f"{said}. {note}{'.' * bool(note)}", result)
    widgets.save_buttons(frame, f"{run.name}-{name}", "table")
    st.dataframe(frame.head(SEEN), hide_index=True)
    widgets.note(described(ANALYSIS[name].__doc__))


def recorded(run: Run, name: str) -> None:
    """A table as it was recorded, and what its columns mean."""
    found = [part for part in run.manifest.parts if part.table == name]
    count, size = sum(part.rows for part in found), sum(part.bytes for part in found)
    cut = f", the first {whole(SEEN)} shown" if count > SEEN else ""
    widgets.heading(
        name,
        f"A row is {TABLES[name].grain}. {plural(count, 'row')}{cut}; {plural(len(found), 'file')}, "
        f"{number(size / 1e6, 2)} MB of Parquet in the run's folder.",
    )
    if count <= MOST:
        widgets.save_buttons(lambda: flat(run.frame(name)), f"{run.name}-{name}", "table")
    else:
        widgets.note(
            f"The table has more than {whole(MOST)} rows, too many for a browser. The files in the run's folder are "
            f"Parquet already; <code>twell export … --table {name} --format csv</code> writes them as CSV."
        )
    st.dataframe(head(run, name), hide_index=True)
    columns = [vars(column) for column in expand(TABLES[name], run.layers, run.d_ff, run.manifest.counts_used)]
    st.dataframe(
        pd.DataFrame(columns)[["name", "type", "unit", "meaning"]].rename(columns={"name": "column"}),
        hide_index=True,
        column_config={"meaning": st.column_config.TextColumn("meaning", width="large")},
    )


def head(run: Run, name: str) -> pd.DataFrame:
    """The first rows of a table, read without the rest."""
    path = run.parts(name)[0]
    try:
        batch = next(open_part(path).iter_batches(SEEN), None)
    except (OSError, pa.ArrowException) as error:
        raise unreadable_part(path, error) from None
    return flat(batch.to_pandas()) if batch is not None else pd.DataFrame()


def flat(frame: pd.DataFrame) -> pd.DataFrame:
    """A table with its bytes as hexadecimal digits, which CSV and a browser can hold."""
    return frame.assign(bytes=[piece.hex() for piece in frame["bytes"]]) if "bytes" in frame else frame


def document(run: Run, kind: str) -> bytes:
    """The run as a notebook or as one page."""
    with tempfile.TemporaryDirectory(prefix="twell-") as folder:
        path = Path(folder) / f"{run.name}.{kind}"
        if kind == "ipynb":
            notebook(run, path, where=str(run.path.absolute()))
        else:
            html_page(run, path)
        return path.read_bytes()


def every_table(run: Run) -> bytes:
    """Each table of the analysis that the run can give, as Parquet in one archive."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
        for name in ANALYSIS:
            try:
                table = fetch(run, ANALYSIS[name]).reset_index(drop=True)
            except Missing:
                continue
            table.attrs = {}
            archive.writestr(f"{run.name}/{name}.parquet", table.to_parquet(index=False))
    return packed.getvalue()


def all_of_it(run: Run) -> None:
    """Buttons for all of it at once."""
    widgets.heading(
        "The whole run",
        "As a notebook, whose cells load the run from its folder and draw every section; as one HTML page with the "
        "same sections, which needs no other file; or as Parquet files, one for each table below.",
    )
    with st.container(horizontal=True, gap="small"):
        for label, kind, mime, make in (
            ("Save as notebook", "ipynb", "application/x-ipynb+json", lambda: document(run, "ipynb")),
            ("Save as one page", "html", "text/html", lambda: document(run, "html")),
            ("Save every table", "zip", "application/zip", lambda: every_table(run)),
        ):
            st.download_button(label, make, f"{run.name}.{kind}", mime, key=f"whole-{kind}", on_click="ignore")


def commands(run: Run) -> None:
    """The same from a shell and from Python."""
    widgets.heading("The same from a shell or a notebook")
    path = str(run.path.absolute())
    more = (f"--format {kind} --out {run.name}.{end}" for kind, end in (("notebook", "ipynb"), ("html", "html")))
    st.code("\n".join(f"twell export {path!r} {line}" for line in ("--out tables", *more)), "bash")
    rows = ("run.activity(tidy=True)", 'run.sql("select count(*) from activity")') if run.has("activity") else ()
    lines = ("analysis.by_token(run)", *rows)
    st.code(
        "from twell import analysis\nfrom twell.workbench import open_run\n\n"
        f"run = open_run({path!r})\n" + "\n".join(lines),
        "python",
    )


def page(run: Run) -> None:
    """The whole run, one table to look at and to save, and the commands."""
    with widgets.show_errors():
        all_of_it(run)
    name = chosen(run)
    with st.container(key="one"), widgets.show_errors():
        if name.startswith(RECORDED):
            recorded(run, name.removeprefix(RECORDED))
        else:
            computed(run, name)
    commands(run)


widgets.title("Take it with you")
page(current_run())
