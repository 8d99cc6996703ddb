"""Write a run as one HTML page, which needs nothing from anywhere else.

    twell export runs/demo --out demo.html

It opens on the sentences and the figure of Overview, the verdict on the paper's claim and those on its parts, shaded
passages and strong neurons; a section for each of `tables.sections` follows, with the reason in its place where the run
lacks what it needs. The page forbids itself any request. Cost: 2 s; 5 MB, nearly all of it plotly.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from twell.analysis.claims.claim import UNTOLD, VERDICTS, scope
from twell.analysis.claims.whole import whole_claim
from twell.analysis.exports.documents.cells import NO_NUMBER
from twell.analysis.exports.documents.introduction import introduction
from twell.analysis.exports.documents.notebook import about
from twell.analysis.exports.documents.strongest import strongest
from twell.analysis.exports.notebook import shaded_text
from twell.analysis.exports.tables import ExportedTable, sections
from twell.analysis.figures import plots
from twell.analysis.figures.claims.evidence import drawings
from twell.analysis.figures.labels import in_table
from twell.analysis.figures.style import CONFIG
from twell.analysis.overview import overview
from twell.analysis.shipped import findings_at_hand
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ROWS = 30  # most rows of a table that are shown
PASSAGES = 3  # with which the page opens
PANELS = "46rem"  # width of a figure of several panels, at least: below, it scrolls
PASSAGE_HEIGHT = "18rem"  # beyond which a passage scrolls
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE = f"""
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #1c2128; }}
h1 {{ font-size: 1.6rem; margin-bottom: .2rem; }} h2 {{ font-size: 1.2rem; margin: 2.4rem 0 .2rem; }}
h3 {{ font-size: 1rem; margin: 1rem 0 .2rem; }} p {{ margin: .2rem 0 .6rem; color: #56606c; }}
nav {{ columns: 11rem; font-size: .9rem; margin: 1rem 0; }} nav a, summary {{ color: #1b65b8; text-decoration: none; }}
nav a {{ display: block; }}
table {{ border-collapse: collapse; font-size: .8rem; }} th, td {{ padding: .2rem .6rem; text-align: left; }}
td {{ border-top: 1px solid #e1e5ea; white-space: pre-wrap; vertical-align: top; font-variant-numeric: tabular-nums; }}
mark {{ background: rgba(47,126,216,.3); }} summary {{ cursor: pointer; }} .wide {{ overflow-x: auto; }}
.panels {{ min-width: {PANELS}; }}
.passage {{ max-height: {PASSAGE_HEIGHT}; overflow-y: auto; border: 1px solid #e1e5ea; padding: .4rem .8rem; }}
.note {{ font-size: .87rem; }} td .note {{ font-size: inherit; }} .verdict {{ color: inherit; font-size: 1.05rem; }}
@media print {{ .passage {{ max-height: none; }} nav {{ display: none; }} h2 {{ break-after: avoid; }} }}
"""


def page(run: Run, path: Path) -> int:
    """Write the HTML page to `path` and return its number of sections.

    Raises Missing for a training, which has recorded no activity.
    """
    from plotly.offline import get_plotlyjs

    title = html.escape(run.name)
    ordered = sections(run)
    body = "".join([*_opening(run), *(_section(run, section) for section in ordered)])
    heads = re.findall(r'<h2 id="([\w-]+)">([^<]+)</h2>', body)
    links = "".join(f'<a href="#{name}">{head}</a>' for name, head in heads)
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body><h1>{title}</h1><p>{html.escape(about(run))}</p>"
        f'<nav aria-label="Sections">{links}</nav>{body}</body></html>\n'
    )
    path.write_bytes(text.encode("utf-8", "replace"))
    return len(ordered)


def _head(title: str, text: str) -> str:
    name = re.sub(r"\W+", "-", title.lower())
    return f'<h2 id="{name}">{html.escape(title)}</h2><p>{html.escape(text)}</p>'


def _opening(run: Run) -> Iterator[str]:
    """Yield what the page opens on, as HTML, without what the run lacks."""
    with suppress(Missing):
        numbers = overview(run)
        said = introduction(run, numbers) if numbers["tokens"] is not None else str(numbers["missing"]["tokens"])
        drawn = f'<div class="wide"><div class="panels">{_drawn(plots.overview(run))}</div></div>'
        yield _head("Overview", f"{said} Below, a row a layer.") + drawn
    yield _claims(run)
    with suppress(Missing):
        passages = [shaded_text(run, number) for number in range(min(PASSAGES, run.manifest.sequences))]
        shown = "".join(
            f'<h3>Sequence {n}</h3><div class="passage" tabindex="0">{one._repr_html_()}</div>'
            for n, one in enumerate(passages)
        )
        yield _head("Text", "Each token is shaded by the neurons that it fires; point at one.") + shown
    with suppress(Missing):
        yield _strongest(run)


def _claims(run: Run) -> str:
    """Return the verdict on the claim as a whole and the claims that are tested, with the drawing of each, as HTML."""
    rows = findings_at_hand(run)
    whole = html.escape(whole_claim(rows, own := scope(run)).sentence)
    rows = rows[rows["verdict"] != UNTOLD]
    images = drawings(run) if len(rows) else {}
    order = {verdict: number for number, verdict in enumerate(VERDICTS)}
    lines = "".join(
        f"<tr><td>{html.escape(row.verdict)}</td><td>{html.escape(row.claim)}</td>"
        f"<td>{images.get(row.claim, '')}</td><td>{_measured(row, own)}</td></tr>"
        for row in rows.sort_values("verdict", key=lambda column: column.map(order), kind="stable").itertuples()
    )
    head = _head("Do published claims hold for this model?", "Each has a rule that was fixed beforehand.")
    return f'{head}<p class="verdict">{whole}</p><div class="wide"><table>{lines}</table></div>'


def _measured(row: Any, own: str) -> str:
    """Return what was measured of a claim, a row of `findings`, as HTML: the answer, how sure it is, and the rule.

    own: the scope of this run, beside which any other is named
    """
    details = [f"told by {row.scope}"] if row.scope != own else []
    details += [text for text in (row.statistic, row.interval and f"95 %: {row.interval}", row.reason) if text]
    return f'{html.escape(row.this_run)}<p class="note">{html.escape("; ".join(details))}</p>'


def _strongest(run: Run) -> str:
    """Return the strongest neuron of each layer as HTML, with the text around its greatest values."""
    lines = []
    for label, rows in strongest(run).groupby("neuron", sort=False):
        text = "<br>".join(
            f"{html.escape(place.before)}<mark>{html.escape(place.token)}</mark>{html.escape(place.after)}"
            for place in rows.itertuples()
        )
        density, largest = rows["density"].iloc[0], rows["value_max"].iloc[0]
        cells = (html.escape(str(label)), f"{density:.2%}", f"{largest:.2f}", text)
        lines.append(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    names = "<tr><th>neuron</th><th>density</th><th>largest value</th><th>where it is largest</th></tr>"
    table = f'<div class="wide"><table>{names}{"".join(lines)}</table></div>'
    return _head("Strongest neurons", "The strongest of each layer.") + table


def _drawn(figure: Figure) -> str:
    figure.update_layout(paper_bgcolor="#fff", plot_bgcolor="#fff")
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG))


def _section(run: Run, section: ExportedTable) -> str:
    """Return one section as HTML: heading, figure, table and note, or the reason why the run has none."""
    head = _head(section.title, section.text)
    try:
        table = section.compute(run)
    except Missing as reason:
        return f'{head}<p class="note">{html.escape(str(reason))}</p>'
    note = _note(table.attrs, len(table))
    try:
        figure = _figure(run, section, table)
    except Missing as reason:
        figure, note = "", f"{reason} {note}".rstrip()
    shown = _named(table.head(ROWS))
    rows = shown.to_html(index=False, float_format=in_table, border=0, na_rep=NO_NUMBER)
    content = f'<div class="wide">{rows}</div>'
    content = f"<details><summary>Table</summary>{content}</details>" if figure else content
    return f'{head}{figure}{content}<p class="note">{html.escape(note)}</p>'


def _figure(run: Run, section: ExportedTable, table: pd.DataFrame) -> str:
    """Return a section's figure as HTML, the dashboard's own where it has one; "" where there is none."""
    if section.page_figure:
        return _drawn(getattr(plots, section.page_figure)(run))
    return _drawn(plots.dressed(section.plot(table))) if section.plot else ""


def _named(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with "all layers" in place of layer -1, the sum over layers."""
    if "layer" not in table:
        return table
    return table.assign(layer=table["layer"].astype(object).where(table["layer"] != -1, "all layers"))


def _note(attrs: Mapping[Any, Any], rows: int) -> str:
    """Return the line under a table of so many rows: how many are shown, and the note in its `attrs`."""
    extent = f"First {ROWS} of {rows:,} rows. " if rows > ROWS else ""
    return extent + str(attrs.get("note", ""))
