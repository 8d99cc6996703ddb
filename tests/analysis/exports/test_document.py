"""The notebook runs from top to bottom, the page needs nothing from elsewhere, arrays come back as they were."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from plotly.offline import get_plotlyjs

from twell.analysis import by_token, dead_mask, fired_csr
from twell.analysis.exports.command import export
from twell.analysis.exports.tables import SECTIONS
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import ExportOptions
from twell.workbench.run.store import Run


def test_notebook_runs(run: Run, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    (path,) = export(ExportOptions(run=run.path, format="notebook", out=tmp_path / "made.ipynb"))
    book = nbformat.read(path, 4)
    nbformat.validate(book)
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"execute_result", "display_data", "stream"}
    said = [output.text for output in outputs if output.output_type == "stream"]
    assert len(said) == 1 and "whole forward pass" in said[0], "all else is there"
    drawn = sum("application/vnd.plotly.v1+json" in output.get("data", {}) for output in outputs)
    assert drawn == sum(bool(section.plot) for section in SECTIONS)


class Page(HTMLParser):
    """What a page would load, and its headings."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]


IMAGE = "data:image/svg+xml;base64,"


def test_page_needs_nothing_else(run: Run, tmp_path: Path) -> None:
    (path,) = export(ExportOptions(run=run.path, format="html", out=tmp_path))
    assert path == tmp_path / "made.html"
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.loads and all(source.startswith(IMAGE) for source in page.loads)
    heads = re.findall("<h2>([^<]+)</h2>", path.read_text(encoding="utf-8"))
    opening = ["Overview", "Claims that this run can test", "Text", *["Neurons"] * run.has("examples")]
    assert heads[: len(opening)] == opening
    assert len(heads) == len(opening) + len(SECTIONS)
    text = re.sub(r"<script.*?</script>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert "formaldehyde" in text
    assert "did not time the whole forward pass" in text
    assert "<td>all layers</td>" in text
    assert not re.search(r"<td>-1</td>|layer -1", path.read_text(encoding="utf-8").replace(get_plotlyjs(), ""))
    assert path.read_text(encoding="utf-8").count("Plotly.newPlot(") >= sum(bool(section.plot) for section in SECTIONS)


def test_text_of_tokens_is_no_markup(made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = made.vocabulary

    def hostile(size: int) -> dict:
        table = plain(size)
        table["text"] = ["<img src=x>" if text else text for text in table["text"]]
        return table

    monkeypatch.setattr(made, "vocabulary", hostile)
    run = made.make(tmp_path / "<b>run", sequences=30, parts=1, tiles=False)
    (path,) = export(ExportOptions(run=run.path, format="html", out=tmp_path / "page.html"))
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    assert "b" not in page.tags
    assert all(source.startswith(IMAGE) for source in page.loads), "the figures of claims, and no image of a token's"


def test_a_poor_run_has_a_page_and_a_notebook(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(
        tmp_path / "poor", layers=1, sequences=6, length=5, parts=1, neurons=False, tiles=False, timings=0, loss=False
    )
    for ending in ("html", "ipynb"):
        (path,) = export(ExportOptions(run=run.path, out=tmp_path / f"poor.{ending}"))
        assert "findings" in path.read_text(encoding="utf-8").lower()


def test_json(run: Run, tmp_path: Path) -> None:
    export(
        ExportOptions(run=run.path, table=("by_token", "vocab", "examples", "activity"), format="json", out=tmp_path)
    )
    records = json.loads((tmp_path / "by_token.json").read_text(encoding="utf-8"))
    pd.testing.assert_frame_equal(pd.DataFrame(records), by_token(run), check_dtype=False)
    vocab = json.loads((tmp_path / "vocab.json").read_text(encoding="utf-8"))
    assert [bytes.fromhex(record["bytes"]) for record in vocab] == run.frame("vocab")["bytes"].tolist()
    windows = [record["window"] for record in json.loads((tmp_path / "examples.json").read_text())]
    expected = [
        [None if np.isnan(value) else pytest.approx(value) for value in row] for row in run.frame("examples")["window"]
    ]
    assert windows == expected
    assert len(json.loads((tmp_path / "activity.json").read_text())) == run.manifest.tokens, "three parts, one array"


def test_arrays(run: Run, tmp_path: Path) -> None:
    written = export(ExportOptions(run=run.path, table=("fired",), format="npz", out=tmp_path / "fired"))
    assert [path.name for path in written] == [f"fired-L{layer}.npz" for layer in range(run.layers)]
    for layer, path in enumerate(written):
        found, (expected, _) = scipy.sparse.load_npz(path), fired_csr(run, layer)
        assert (found != expected).nnz == 0
        assert found.shape == expected.shape
    (path,) = export(ExportOptions(run=run.path, table=("dead_neurons",), format="npz", out=tmp_path / "dead.npz"))
    np.testing.assert_array_equal(np.load(path)["dead"], dead_mask(run))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dead.npz", "fired"]


def test_refused(run: Run, bos_run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no --table with --format html"):
        export(ExportOptions(run=run.path, table=("by_layer",), format="html", out=tmp_path / "x"))
    with pytest.raises(UserError, match="--table fired or --table dead_neurons"):
        export(ExportOptions(run=run.path, table=("by_layer",), format="npz", out=tmp_path / "x"))
    with pytest.raises(Missing, match="no fired table"):
        export(ExportOptions(run=bos_run.path, table=("fired",), format="npz", out=tmp_path / "x"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="choose a place"):
        export(ExportOptions(run=run.path, format="html", out=tmp_path / "file" / "x.html"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
