"""The gallery's notebooks: run their cells, and write what they show into the files, figures as images.

    PYTHONPATH=tests python -m support.gallery [NAME …]    anew, all of them or some; needs plotly and a chromium

Cells run one after another in this process, as a kernel would run them. A figure of plotly and a shaded text become PNG
images, which code hosts show; a table stays one. Each notebook records a checksum of its cells, by which a test sees
outputs that are not of them. Cost: a few seconds each.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import pandas as pd

FOLDER = Path(str(resources.files("twell.data") / "notebooks"))
WIDTH = 900  # pixels of an image
DRAW = """async (figure) => {
  const place = document.createElement('div');
  document.body.appendChild(place);
  await Plotly.newPlot(place, figure.data, figure.layout, {staticPlot: true});
  return await Plotly.toImage(place, {format: 'png', width: WIDTH, height: figure.layout.height || 400, scale: 1.5});
}""".replace("WIDTH", str(WIDTH))


@dataclass
class Shown:
    """What a cell showed: what it printed, and the value of its last line, None where that is a statement."""

    printed: str
    value: Any


def notebooks() -> list[Path]:
    """Return the notebooks of the gallery, by name."""
    return sorted(FOLDER.glob("*.ipynb"))


def code_cells(book: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a notebook's cells of code."""
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def checksum(book: dict[str, Any]) -> str:
    """Return a checksum of a notebook's cells without their outputs."""
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in book["cells"]]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def run(book: dict[str, Any]) -> Iterator[Shown]:
    """Run a notebook's cells of code, and yield what each shows."""
    space: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(book)):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        printed, value = io.StringIO(), None
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            exec(compile(tree, f"cell {number}", "exec"), space)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), space)
        yield Shown(printed.getvalue(), value)


def outputs(shown: Shown, page: Any) -> list[dict[str, Any]]:
    """Return a cell's outputs as a notebook has them. page: of a browser, which draws images"""
    result: list[dict[str, Any]] = []
    if shown.printed:
        result.append({"output_type": "stream", "name": "stdout", "text": shown.printed.splitlines(keepends=True)})
    values = shown.value if isinstance(shown.value, tuple) else (shown.value,)
    if all(value is None for value in values):
        return result
    if len(values) == 1:
        data = _data(values[0], page)
    else:
        data = {"text/plain": "\n\n".join(str(value) for value in values).splitlines(keepends=True)}
    return [*result, {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}]


def _data(value: Any, page: Any) -> dict[str, Any]:
    """Return a value as a notebook's output: an image, or a table, beside its text."""
    if hasattr(value, "to_plotly_json"):
        return {"image/png": _figure(value, page), "text/plain": ["A figure."]}
    if isinstance(value, pd.DataFrame):
        table = value.to_html(border=0)
        return {"text/html": table.splitlines(keepends=True), "text/plain": value.to_string().splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
        return {"image/png": _html(value._repr_html_(), page), "text/plain": str(value).splitlines(keepends=True)}
    return {"text/plain": repr(value).splitlines(keepends=True)}


def _figure(figure: Any, page: Any) -> str:
    """Return a figure as PNG, base64, on white."""
    described = json.loads(figure.to_json())
    described["layout"] |= {"paper_bgcolor": "white", "plot_bgcolor": "white"}
    return str(page.evaluate(DRAW, described)).partition(",")[2]


def _html(markup: str, page: Any) -> str:
    """Return a piece of HTML as PNG, base64."""
    page.evaluate("html => { document.body.innerHTML = `<div id='shown'>${html}</div>` }", markup)
    return base64.b64encode(page.locator("#shown").screenshot()).decode()


def write(path: Path, page: Any) -> None:
    """Run a notebook and write its outputs into it."""
    book = json.loads(path.read_text(encoding="utf-8"))
    for number, (cell, shown) in enumerate(zip(code_cells(book), run(book), strict=True)):
        cell["execution_count"] = number + 1
        cell["outputs"] = outputs(shown, page)
        for output in cell["outputs"]:
            if "execution_count" in output:
                output["execution_count"] = number + 1
    book["metadata"]["twell"] = {"cells": checksum(book)}
    path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(names: list[str]) -> None:
    """Write the notebooks of these names anew, or all."""
    from playwright.sync_api import sync_playwright
    from plotly.offline import get_plotlyjs

    chromium = os.environ.get("TWELL_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 600}, device_scale_factor=1.5)
        page.set_content("<body style='font: 16px sans-serif; margin: 12px; background: white'></body>")
        page.add_script_tag(content=get_plotlyjs())
        for path in notebooks():
            if not names or path.stem in names:
                write(path, page)
                print(path.name, f"{path.stat().st_size / 1024:.0f} KiB", flush=True)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
