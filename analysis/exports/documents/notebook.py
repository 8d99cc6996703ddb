"""Write a run as a notebook that has run: its cells, what they show, and each figure as an image, too.

    twell export runs/demo --out demo.ipynb

Code hosts and nbconvert show the images, Jupyter the figures of plotly. The cells run here, on the run that is open, so
that no kernel is needed. Cost: some seconds, with images 0.2 s more for each; 2 MB.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from twell.analysis.exports.documents import cells
from twell.analysis.exports.tables import sections
from twell.analysis.summaries.read import open_summaries
from twell.workbench.run.manifest import spelled
from twell.workbench.run.store import Run

ROWS = 10  # of a table that are shown
PASSAGES = 2
IMPORTS = """from twell.analysis import *
from twell.analysis import plots
from twell.analysis.claims.claim import UNTOLD, scope
from twell.analysis.claims.whole import whole_claim
from twell.analysis.exports.documents.strongest import strongest
from twell.analysis.shipped import findings_at_hand
from twell.workbench import open_run
from twell.workbench.errors import Missing"""
AGAIN = (
    "Run again in Jupyter, figures are plotly's alone. To keep an image beside each: "
    '`plotly.io.renderers.default = "plotly_mimetype+png"`, after `pip install kaleido`. A page of it that needs no '
    "network: `jupyter nbconvert --to html --HTMLExporter.require_js_url= --HTMLExporter.mathjax_url=`."
)


@dataclass(frozen=True)
class Cell:
    """A cell: its text or code, and the code that runs here in its place, where that differs."""

    source: str
    code: bool = True
    runs: str = ""


def notebook(run: Run, path: Path, where: str | None = None) -> tuple[int, str]:
    """Write the notebook to `path`; return its number of cells, and why it has no images, or "".

    where: the path by which the notebook opens the run; by default the run's path relative to the notebook.
    Raises Missing for a training, which has recorded no activity.
    """
    open_summaries(run)
    where = where or Path(os.path.relpath(run.path, path.parent)).as_posix()
    book = _cells(run, where)
    space: dict[str, Any] = {"__name__": "__main__", "run": run}
    shown = [cells.run_cell(cell.runs or cell.source, space) for cell in book if cell.code]
    titles = [before.source.partition("\n")[0].lstrip("# ") for before, cell in pairwise(book) if cell.code]
    outputs, note = cells.outputs(shown, titles)
    if note:
        book[0] = Cell(f"{book[0].source}\n\n{inert(note)}", code=False)
    written = [_written(cell) for cell in book]
    for number, (cell, output) in enumerate(
        zip((cell for cell in written if cell["cell_type"] == "code"), outputs, strict=True)
    ):
        cell |= {"outputs": output, "execution_count": number + 1}
    numbered = [{**cell, "id": f"cell-{number}"} for number, cell in enumerate(written)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": numbered}
    text = json.dumps(whole, indent=1, ensure_ascii=False)
    path.write_bytes(text.encode("utf-8", "replace") + b"\n")  # a token may hold half a surrogate pair
    return len(book), note


def _cells(run: Run, where: str) -> list[Cell]:
    """Return the notebook's cells: what the run is, its text and neurons, then a section a table."""
    opened = f"open_run({where!r}{', without_damaged=True' if run.left_out else ''})"
    result = [
        Cell(f"# {inert(run.name)}\n\n{inert(about(run))}", code=False),
        Cell(f"{IMPORTS}\n\nrun = {opened}\nrun", runs=f"{IMPORTS}\n\nrun"),
        Cell("## Overview\n\nA row a layer.", code=False),
        _tried("display(plots.overview(run))"),
        Cell("## Do published claims hold for this model?\n\nEach claim by itself is at the end.", code=False),
        _tried("print(whole_claim(findings_at_hand(run), scope(run)).sentence)"),
        Cell("## Text\n\nEach token is shaded by the neurons that it fires.", code=False),
        _tried(*(f"display(run.text({number}))" for number in range(min(PASSAGES, run.manifest.sequences)))),
        Cell("## Strongest neurons\n\nThe strongest of each layer, and the text where it is largest.", code=False),
        _tried("display(strongest(run))"),
    ]
    for section in sections(run):
        result.append(Cell(f"## {section.title}\n\n{section.text}", code=False))
        lines = [f"table = {section.name}(run)"]
        if section.name == "findings":
            lines.append('table = table.loc[table["verdict"] != UNTOLD, ["verdict", "claim", "this_run"]]')
        lines += [f"display({section.figure_code})"] if section.figure_code else []
        shown = "table" if section.name == "findings" else f"table.head({ROWS})"
        result.append(_tried(*lines, f"display({shown})"))
    return [*result, Cell(AGAIN, code=False)]


def _tried(*lines: str) -> Cell:
    """Return a cell that runs these lines, and prints what the run lacks for them."""
    body = "\n".join(f"    {line}" for line in lines)
    return Cell(f"try:\n{body}\nexcept Missing as reason:\n    print(reason)")


def _written(cell: Cell) -> dict[str, Any]:
    """Return a cell as a notebook's file has it."""
    if not cell.code:
        return {"cell_type": "markdown", "metadata": {}, "source": cell.source}
    return {"cell_type": "code", "metadata": {}, "source": cell.source, "outputs": [], "execution_count": None}


def about(run: Run) -> str:
    """Return a sentence on the run's model, text, device and kernel, and its definition of nnz."""
    manifest = run.manifest
    return (
        f"{manifest.model['name']}: {manifest.tokens:,} tokens of {manifest.sequences:,} sequences, "
        f"{run.layers} layers of {spelled(manifest.widths, str)} neurons, {manifest.device}, "
        f"kernel {manifest.kernel['name']}. "
        f"nnz: {manifest.nnz_definition}.{run.left_out and f' {run.left_out}'}"
    )


def inert(text: str) -> str:
    """Return text on one line that Markdown shows as it is: a run's name may hold markup, formulas and links."""
    return re.sub(r"([\\`*_{}\[\]()#+!|<>~$&:])", r"\\\1", " ".join(text.split()))
