"""A run in one document: what the notebook and the page show, section by section.

    twell export runs/demo --format notebook --out demo.ipynb   cells that load the run and show tables and figures
    twell export runs/demo --format html --out demo.html        one page that needs nothing from anywhere else

A section that the run cannot give is left out of the page, with the reason in its place; in the notebook the cell
prints it. Cost: 2 s; the page is 5 MB, nearly all of it the library that draws.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from twell import analysis
from twell.analysis.exports import plots
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

ROWS = 30  # of a table, in the page


@dataclass(frozen=True)
class Section:
    """A heading, a sentence, the function of the API and its arguments, and the figure of `plots` if there is one."""

    title: str
    text: str
    table: str
    figure: str = ""
    arguments: str = ""

    @property
    def call(self) -> str:
        return f"{self.table}(run{self.arguments and ', '}{self.arguments})"


SECTIONS = (
    Section("Findings", "What has been claimed of sparse layers, and what this run says.", "findings"),
    Section("Layers", "How many neurons a token fires in each layer.", "by_layer", "layers"),
    Section("Positions", "Mean nnz along the sequence, over the layer's own mean.", "position_blocks", "positions"),
    Section("Decay", "a + b·exp(-p/λ) against a power law, from position 1 on.", "position_fit"),
    Section("Tokens", "Loudest and quietest, z shrunk by how rarely a token occurs.", "by_token", "tokens"),
    Section("Classes", "Kinds of tokens, by their spelling.", "token_classes", "classes"),
    Section("Words", "Put together from their pieces.", "by_word"),
    Section("Surprisal", "nnz by the loss of the next token.", "surprisal", "surprisal"),
    Section("Rank correlation", "Spearman's, of nnz and the next token's loss.", "surprisal_correlation"),
    Section("Concentration", "What the busiest neurons carry.", "concentration"),
    Section("Lorenz curve", "Firings by share of neurons.", "lorenz", "lorenz"),
    Section("Dead neurons", "Without a firing, by sequences seen.", "dead_curve", "dead"),
    Section("Unions", "Different neurons in a block of consecutive tokens.", "union_sizes"),
    Section("Tiles", "What exceeds the slots of a tile, by compression.", "tile_audit"),
    Section("Speed", "Dense over sparse, by layer, and the trend.", "layer_gains", "gains"),
    Section("Time", "Where the time of a forward pass goes.", "model_time"),
)


def notebook(run: Run, path: Path, where: str | None = None) -> int:
    """Write the notebook; returns its cells. It finds the run at `where`, or else by its path from the notebook."""
    where = where or Path(os.path.relpath(run.path, path.parent)).as_posix()
    opening = (
        "import pandas as pd\n\nfrom twell.analysis import *\nfrom twell.analysis import plots\n"
        "from twell.workbench import open_run\nfrom twell.workbench.errors import Missing\n\n"
        f"run = open_run({where!r})\noverview(run)"
    )
    cells = [_markdown(f"# {run.name}\n\n{_about(run)}"), _code(opening)]
    for section in SECTIONS:
        shown = f"    display(table.head({ROWS}))\n"
        if section.figure:
            shown += f"    plots.{section.figure}(table).show()\n"
        cells.append(_markdown(f"## {section.title}\n\n{section.text}"))
        source = f"try:\n    table = {section.call}\n{shown}except Missing as reason:\n    print(reason)"
        cells.append(_code(source))
    numbered = [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(cells)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": numbered}
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return len(cells)


def _markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text}


def _code(text: str) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": {}, "source": text, "outputs": [], "execution_count": None}


def _about(run: Run) -> str:
    told = run.manifest
    return (
        f"{told.model['name']}: {told.tokens:,} tokens of {told.sequences:,} sequences, {run.layers} layers of "
        f"{run.d_ff} neurons, {told.device}, kernel {told.kernel['name']}. nnz: {told.nnz_definition}."
    )


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; font-size: 0.8rem; } th, td { padding: 0.15rem 0.6rem; text-align: left; }
td { border-top: 1px solid #ddd; white-space: pre-wrap; vertical-align: top; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; color: #2f5d8a; } .wide { overflow-x: auto; } .note { color: #666; }
"""


def page(run: Run, path: Path) -> int:
    """Write the page; returns its sections."""
    from plotly.offline import get_plotlyjs

    title = html.escape(run.name)
    body = [f"<h1>{title}</h1><p>{html.escape(_about(run))}</p>"]
    body += [_section(run, section) for section in SECTIONS]
    text = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<script>{get_plotlyjs()}</script></head><body>{''.join(body)}</body></html>\n"
    )
    path.write_text(text, encoding="utf-8")
    return len(SECTIONS)


def _section(run: Run, section: Section) -> str:
    head = f"<h2>{html.escape(section.title)}</h2><p>{html.escape(section.text)}</p>"
    question: Callable[..., pd.DataFrame] = getattr(analysis, section.table)
    try:
        table = question(run)
    except Missing as reason:
        return f'{head}<p class="note">{html.escape(str(reason))}</p>'
    drawn = ""
    if section.figure:
        figure = getattr(plots, section.figure)(table)
        drawn = figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False})
    note = _note(table.attrs, len(table))
    rows = _named(table.head(ROWS)).to_html(index=False, float_format=lambda value: f"{value:.4g}", border=0)
    shown = f'<div class="wide">{rows}</div>'
    shown = f"<details><summary>Table</summary>{shown}</details>" if drawn else shown
    return f'{head}{drawn}{shown}<p class="note">{html.escape(note)}</p>'


def _named(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with the sum over layers called by its name, not by its number."""
    if "layer" not in table:
        return table
    return table.assign(layer=table["layer"].astype(object).where(table["layer"] != -1, "all layers"))


def _note(attrs: Mapping[Any, Any], rows: int) -> str:
    more = f"First {ROWS} of {rows:,} rows. " if rows > ROWS else ""
    return more + str(attrs.get("note", ""))
