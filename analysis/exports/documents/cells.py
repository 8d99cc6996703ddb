"""Run a notebook's cells in this process, and write down what they show, each figure with an image beside it.

A kernel would do the same, with more to install and a process to start. `print` and `display` are a cell's own, so
that nothing of other threads gets into it.
"""

from __future__ import annotations

import ast
import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from twell.analysis.exports.documents.images import WIDTH, figure_of_svg, height, png_images
from twell.analysis.exports.documents.passage_image import svg
from twell.analysis.exports.notebook import ShadedText
from twell.analysis.figures.labels import in_table
from twell.analysis.figures.style import CONFIG
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

NO_NUMBER = "–"  # in a table
PLOTLY, PNG, SVG = "application/vnd.plotly.v1+json", "image/png", "image/svg+xml"


@dataclass
class Shown:
    """The output of a cell, in order: printed strings, and values; the last is that of its last line if `ends`."""

    values: list[Any] = field(default_factory=list)
    ends: bool = False


def run_cell(source: str, space: dict[str, Any]) -> Shown:
    """Run a cell's code in the namespace `space`, and return what it showed."""
    shown = Shown()
    space["print"] = lambda *values: shown.values.append(" ".join(map(str, values)) + "\n")
    space["display"] = lambda *values: shown.values.extend(values)
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), space)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), space)
        if value is not None:
            shown.values.append(value)
            shown.ends = True
    return shown


def outputs(cells: Sequence[Shown], titles: Sequence[str]) -> tuple[list[list[dict[str, Any]]], str]:
    """Return the outputs of each cell, as a notebook has them, and a sentence on images that cannot be drawn, or "".

    A figure has the data that plotly draws and a PNG; a shaded passage a PNG, or SVG where there is none. titles: a
    cell's heading, which describes its images to readers who do not see them.
    """
    drawings = {id(value): svg(value) for cell in cells for value in cell.values if isinstance(value, ShadedText)}
    figures = {id(value): value for cell in cells for value in cell.values if _is_figure(value)}
    figures |= {key: figure_of_svg(*drawing) for key, drawing in drawings.items()}
    note, images = "", {}
    try:
        images = dict(zip(figures, png_images(list(figures.values())), strict=True))
    except Missing as reason:
        note = str(reason)
    result = []
    for number, (cell, title) in enumerate(zip(cells, titles, strict=True)):
        written: list[dict[str, Any]] = []
        for value in cell.values:
            if isinstance(value, str):
                written.append({"output_type": "stream", "name": "stdout", "text": value})
                continue
            output = {"output_type": "display_data", **_bundle(value, images.get(id(value)), drawings)}
            if PNG in output["metadata"]:
                output["metadata"][PNG]["alt"] = title
            written.append(output)
        if cell.ends and not isinstance(cell.values[-1], str):
            written[-1] |= {"output_type": "execute_result", "execution_count": number + 1}
        result.append(written)
    return result, note


def _bundle(value: Any, image: bytes | None, drawings: dict[int, tuple[str, int]]) -> dict[str, Any]:
    """Return a value's data and metadata as a notebook's output has them."""
    data: dict[str, Any] = {"text/plain": "A figure." if _is_figure(value) else str(value)}
    metadata: dict[str, Any] = {}
    if _is_figure(value):
        data[PLOTLY] = {**json.loads(value.to_json()), "config": CONFIG}
        tall = height(value)
    elif isinstance(value, ShadedText):
        drawing, tall = drawings[id(value)]
        if image is None:
            data[SVG] = drawing
    elif isinstance(value, pd.DataFrame):
        data["text/html"] = value.to_html(border=0, index=False, float_format=in_table, na_rep=NO_NUMBER)
        data["text/plain"] = value.to_string(index=False, na_rep=NO_NUMBER)
    elif isinstance(value, Run):
        data["text/html"] = value._repr_html_()
    if image is not None:
        data[PNG] = base64.b64encode(image).decode()
        metadata = {PNG: {"width": WIDTH, "height": tall}}
    return {"data": data, "metadata": metadata}


def _is_figure(value: Any) -> bool:
    return hasattr(value, "to_plotly_json")
