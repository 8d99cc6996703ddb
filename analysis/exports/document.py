"""Write a run as one notebook or one HTML page, with a section for each of `tables.SECTIONS`.

    twell export runs/demo --format notebook --out demo.ipynb   cells that load the run and show tables and figures
    twell export runs/demo --format html --out demo.html        one page that needs nothing from anywhere else

Where the run lacks what a section needs, the page has the reason instead, and the notebook's cell prints it.
Cost: 2 s; the page is 5 MB, nearly all of it plotly.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from twell.analysis.claims.claim import UNTOLD, VERDICTS
from twell.analysis.claims.findings import findings
from twell.analysis.exports.notebook import shaded_text
from twell.analysis.exports.tables import SECTIONS, ExportedTable
from twell.analysis.figures import plots
from twell.analysis.figures.claims.evidence import drawings
from twell.analysis.neurons.by_neuron import by_neuron
from twell.analysis.neurons.examples import examples
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ROWS = 30  # most rows of a table that are shown
PASSAGES, NEURONS = 3, 12  # with which the page opens


def notebook(run: Run, path: Path, where: str | None = None) -> int:
    """Write the notebook to `path` and return its number of cells.

    where: the path by which the notebook opens the run; by default the run's path relative to the notebook.
    """
    where = where or Path(os.path.relpath(run.path, path.parent)).as_posix()
    opening = (
        "import pandas as pd\n\nfrom twell.analysis import *\nfrom twell.analysis import plots\n"
        "from twell.workbench import open_run\nfrom twell.workbench.errors import Missing\n\n"
        f"run = open_run({where!r}{', without_damaged=True' if run.left_out else ''})\noverview(run)"
    )
    cells = [_markdown(f"# {run.name}\n\n{_about(run)}"), _code(opening)]
    for section in SECTIONS:
        display = f"    display(table.head({ROWS}))\n"
        if section.plot:
            display += f"    plots.{section.plot.__name__}(table).show()\n"
        cells.append(_markdown(f"## {section.title}\n\n{section.text}"))
        source = f"try:\n    table = {section.name}(run)\n{display}except Missing as reason:\n    print(reason)"
        cells.append(_code(source))
    numbered = [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(cells)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": numbered}
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return len(cells)


def _markdown(text: str) -> dict[str, Any]:
    """Return a notebook cell of text."""
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def _code(text: str) -> dict[str, Any]:
    """Return a notebook cell of code that has not run."""
    return {"cell_type": "code", "metadata": {}, "source": text, "outputs": [], "execution_count": None}


def _about(run: Run) -> str:
    """Return a sentence on the run's model, text, device and kernel, and its definition of nnz."""
    manifest = run.manifest
    return (
        f"{manifest.model['name']}: {manifest.tokens:,} tokens of {manifest.sequences:,} sequences, "
        f"{run.layers} layers of {run.d_ff} neurons, {manifest.device}, kernel {manifest.kernel['name']}. "
        f"nnz: {manifest.nnz_definition}.{run.left_out and f' {run.left_out}'}"
    )


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 0.8rem; } th, td { padding: 0.15rem 0.6rem; text-align: left; }
td { border-top: 1px solid #ddd; white-space: pre-wrap; vertical-align: top; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; color: #2f5d8a; } .wide { overflow-x: auto; } .note { color: #666; }
"""


def page(run: Run, path: Path) -> int:
    """Write the HTML page to `path` and return its number of sections."""
    from plotly.offline import get_plotlyjs

    title = html.escape(run.name)
    body = [f"<h1>{title}</h1><p>{html.escape(_about(run))}</p>", *_opening(run)]
    body += [_section(run, section) for section in sorted(SECTIONS, key=lambda section: section.name == "findings")]
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body>{''.join(body)}</body></html>\n"
    )
    path.write_text(text, encoding="utf-8")
    return len(SECTIONS)


def _opening(run: Run) -> list[str]:
    """Return what the page opens on, as HTML: the figure of Overview, the claims that the run can test, and passages
    shaded by the neurons that each token fires; without what the run lacks."""
    parts = []
    with suppress(Missing):
        figure = plots.overview(run)
        figure.update_layout(paper_bgcolor="#fff", plot_bgcolor="#fff")
        parts.append(f"<h2>Overview</h2><p>A row a layer.</p>{_drawn(figure)}")
    rows = findings(run)
    rows = rows[rows["verdict"] != UNTOLD]
    images = drawings(run)
    if len(rows):
        order = {verdict: number for number, verdict in enumerate(VERDICTS)}
        lines = [
            f"<tr><td>{html.escape(row.verdict)}</td><td>{html.escape(row.claim)}</td>"
            f"<td>{images.get(row.claim, '')}</td><td>{html.escape(row.this_run)}</td></tr>"
            for row in rows.sort_values("verdict", key=lambda column: column.map(order), kind="stable").itertuples()
        ]
        parts.append(f'<h2>Claims that this run can test</h2><div class="wide"><table>{"".join(lines)}</table></div>')
    with suppress(Missing):
        passages = [shaded_text(run, number) for number in range(min(PASSAGES, run.manifest.sequences))]
        shown = "".join(f"<h3>Sequence {n}</h3>{one._repr_html_()}" for n, one in enumerate(passages))
        parts.append(f"<h2>Text</h2><p>Each token is shaded by the neurons that it fires; point at one.</p>{shown}")
    with suppress(Missing):
        parts.append(_neurons(run))
    return parts


def _neurons(run: Run) -> str:
    """Return the strongest neurons as HTML, with the text around their greatest values. Missing without examples."""
    if not run.has("examples"):
        raise Missing(f"{run.name} keeps no examples of its neurons.")
    table = by_neuron(run).sort_values("value_max", ascending=False).drop_duplicates("layer").head(NEURONS)
    lines = []
    for row in table.itertuples():
        text = ""
        with suppress(Missing):  # a neuron of which none is kept
            places = examples(run, int(row.layer), int(row.neuron), width=8)
            text = "<br>".join(
                f"{html.escape(place.before)}<mark>{html.escape(place.token)}</mark>{html.escape(place.after)}"
                for place in places[places["kind"] == "top"].head(2).itertuples()
            )
        cells = "".join(f"<td>{cell}</td>" for cell in (row.label, f"{row.density:.2%}", f"{row.value_max:.2f}", text))
        lines.append(f"<tr>{cells}</tr>")
    head = "<tr><th>neuron</th><th>density</th><th>largest value</th><th>where it is largest</th></tr>"
    rows = "".join([head, *lines])
    return f'<h2>Neurons</h2><p>The strongest of each layer.</p><div class="wide"><table>{rows}</table></div>'


def _drawn(figure: Figure) -> str:
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))


def _section(run: Run, section: ExportedTable) -> str:
    """Return one section as HTML: heading, figure, table and note, or the reason why the run has none."""
    head = f"<h2>{html.escape(section.title)}</h2><p>{html.escape(section.text)}</p>"
    try:
        table = section.compute(run)
    except Missing as reason:
        return f'{head}<p class="note">{html.escape(str(reason))}</p>'
    figure = ""
    if section.plot:
        figure = _drawn(section.plot(table))
    note = _note(table.attrs, len(table))
    rows = _named(table.head(ROWS)).to_html(index=False, float_format=lambda value: f"{value:.4g}", border=0)
    content = f'<div class="wide">{rows}</div>'
    content = f"<details><summary>Table</summary>{content}</details>" if figure else content
    return f'{head}{figure}{content}<p class="note">{html.escape(note)}</p>'


def _named(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with "all layers" in place of layer -1, the sum over layers."""
    if "layer" not in table:
        return table
    return table.assign(layer=table["layer"].astype(object).where(table["layer"] != -1, "all layers"))


def _note(attrs: Mapping[Any, Any], rows: int) -> str:
    """Return the line under a table of so many rows: how many are shown, and the note in its `attrs`."""
    extent = f"First {ROWS} of {rows:,} rows. " if rows > ROWS else ""
    return extent + str(attrs.get("note", ""))
