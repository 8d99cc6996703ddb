"""The notebook shows what a kernel would, the page needs nothing from elsewhere, arrays come back as they were."""

from __future__ import annotations

import html
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
from plotly.offline import get_plotlyjs
from support.planted_effects import add_effects

from twell.analysis import by_token, dead_mask, fired_csr, overview, plots
from twell.analysis.claims.claim import scope
from twell.analysis.claims.whole import whole_claim
from twell.analysis.exports.command import export
from twell.analysis.exports.documents import cells
from twell.analysis.exports.documents.introduction import introduction
from twell.analysis.exports.documents.notebook import PASSAGES, notebook
from twell.analysis.exports.documents.passage_image import COLUMNS, _placed, svg
from twell.analysis.exports.notebook import ShadedText, card, shaded_text
from twell.analysis.exports.tables import ABLATIONS, SECTIONS
from twell.analysis.figures.labels import plural
from twell.analysis.passage import Scale
from twell.analysis.shipped import findings_at_hand
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import ExportOptions
from twell.workbench.run.store import Run


@pytest.fixture(scope="module")
def poor(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with few figures, whose name and tokens are markup."""
    plain, markup = made.vocabulary, iter(HOSTILE * 1000)

    def hostile(size: int) -> dict:
        table = plain(size)
        return table | {"bytes": [next(markup).encode() if piece else piece for piece in table["bytes"]]}

    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(made, "vocabulary", hostile)
        given = {"layers": 1, "sequences": 6, "length": 12, "parts": 1, "timings": 0}
        run: Run = made.make(tmp_path_factory.mktemp("poor") / NAME, neurons=False, tiles=False, loss=False, **given)
    return run


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</svg><script>alert(1)</script>",
    "$\\href{javascript:alert(1)}{x}$",
    "\x00&]]>",
]
NAME = "[run](javascript:alert(1)) <b>"


@pytest.mark.usefixtures("without_images")
def test_notebook_is_what_a_kernel_shows(run: Run, tmp_path: Path) -> None:
    """Without a browser for images. Each cell's outputs are of the kinds that Jupyter's kernel gives for its code."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    (path,) = export(ExportOptions(run=run.path, format="notebook", out=tmp_path / "made.ipynb"))
    book = nbformat.read(path, 4)
    nbformat.validate(book)
    assert "No images here" in book.cells[0].source
    ours = [kinds_of(cell.outputs) for cell in book.cells if cell.cell_type == "code"]
    passages = [
        output for cell in book.cells for output in cell.get("outputs", []) if cells.SVG in output.get("data", {})
    ]
    assert len(passages) == PASSAGES and "<svg" in passages[0].data[cells.SVG]
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert [kinds_of(cell.outputs) for cell in book.cells if cell.cell_type == "code"] == ours
    drawn = sum(one.count("figure") for one in ours)
    assert drawn == 1 + sum(bool(section.figure_code) for section in SECTIONS) - 3, "it has one source and one phase"


def test_a_notebook_shows_microseconds_in_full() -> None:
    shown = cells.run_cell("import pandas\npandas.DataFrame({'us': [67654.3]})", {})
    ((output,),), _ = cells.outputs([shown], [""])
    assert "<td>67654</td>" in output["data"]["text/html"]


def kinds_of(outputs: list[Any]) -> list[str]:
    """What each output is: a figure, a printed line, the table's text, or a value."""
    kinds = []
    for output in outputs:
        data = output.get("data", {})
        if cells.PLOTLY in data:
            kinds.append("figure")
        elif output.output_type == "stream":
            kinds.append(output.text)
        else:
            kinds.append("table" if "<table" in data.get("text/html", "") else "value")
    return kinds


def test_each_section_of_a_page_has_its_figure() -> None:
    named = {section.page_figure for section in SECTIONS if section.page_figure}
    assert len(named) > 10 and named <= set(plots.__all__)
    assert {section.plot.__name__ for section in SECTIONS if section.plot} <= set(plots.__all__)


@pytest.mark.usefixtures("without_images")
def test_a_notebook_shows_markup_as_text(poor: Run, tmp_path: Path) -> None:
    """In the name of the run and in its tokens."""
    notebook(poor, path := tmp_path / "poor.ipynb")
    book = json.loads(path.read_text(encoding="utf-8"))
    bundles = [output.get("data", {}) for cell in book["cells"] for output in cell.get("outputs", [])]
    markup = [data["text/html"] for data in bundles if "text/html" in data]
    assert markup and not [one for one in markup if re.search(r"<(img|script)", one)]
    assert book["cells"][0]["source"].startswith(r"# \[run\]\(javascript\:alert\(1\)\) \<b\>")


def test_a_passage_is_drawn_as_text(poor: Run) -> None:
    """The SVG of tokens of markup is well formed, holds them as text, and nothing that loads or runs."""
    drawing, tall = svg(shaded_text(poor, 0))
    root = ElementTree.fromstring(drawing)
    assert int(root.get("height", 0)) == tall
    assert {element.tag.partition("}")[2] for element in root.iter()} == {"svg", "rect", "text"}
    written = "".join(element.text or "" for element in root.iter())
    assert HOSTILE[0].replace(" ", "") in written.replace(" ", "")


def test_a_console_shows_a_passage_as_its_text(poor: Run) -> None:
    passage = shaded_text(poor, 0)
    assert repr(passage) == str(passage) == "".join(passage.texts)


def test_a_passage_keeps_lines_and_widths() -> None:
    """A token moves to the next line whole, a longer one than a line is broken, and long texts end."""
    texts = ["ab\n", "x" * (COLUMNS - 1), " word", "漢字", "y" * (COLUMNS + 5), "\n" * 100, "end"]
    shares = np.linspace(0, 1, len(texts))
    passage = ShadedText(pd.DataFrame(), texts, Scale("nnz", "neurons", 0.0, 9.0), shares, [""] * len(texts))
    pieces = list(_placed(passage))
    assert max(piece.column + piece.width for piece in pieces) == COLUMNS
    assert [(piece.line, piece.text) for piece in pieces[:4]] == [(0, "ab"), (1, texts[1]), (2, "word"), (2, "漢字")]
    assert pieces[3].width == 4
    assert ">…<" in svg(passage)[0] and "end" not in svg(passage)[0]


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
    assert page.loads and all(source.startswith((IMAGE, "#")) for source in page.loads)
    assert "default-src 'none'" in path.read_text(encoding="utf-8")[:400], "the page forbids itself any request"
    heads = re.findall("<h2 [^>]+>([^<]+)</h2>", path.read_text(encoding="utf-8"))
    opening = ["Overview", "Do published claims hold for this model?", "Text"]
    opening += ["Strongest neurons"] * run.has("examples")
    assert heads[: len(opening)] == opening
    assert len(heads) == len(opening) + len(SECTIONS)
    text = re.sub(r"<script.*?</script>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert "formaldehyde" in text
    assert "did not time the whole forward pass" in text
    assert "<td>all layers</td>" in text
    assert not re.search(r"<td>[-.\d]+e\+\d+</td>", text), "microseconds are shown in full"
    assert not re.search(r"<td>-1</td>|layer -1", path.read_text(encoding="utf-8").replace(get_plotlyjs(), ""))
    assert (
        path.read_text(encoding="utf-8").count("Plotly.newPlot(")
        >= sum(bool(section.figure_code) for section in SECTIONS) - 3
    )
    assert "Every token is of one phase, prefill: there is none to compare it with." in text, "in place of empty axes"
    verdict = html.escape(whole_claim(findings_at_hand(run), scope(run)).sentence)
    assert f'<p class="verdict">{verdict}</p>' in text and "cannot be told: " in verdict, "whole, as on page Findings"
    said = html.escape(introduction(run, overview(run)))
    opens = f'<h2 id="overview">Overview</h2><p>{said} Below, a row a layer.</p>'
    assert f'{opens}<div class="wide"><div class="panels">' in text, "its panels scroll where they have no room"
    numbered = [line.cliponaxis for line in plots.overview(run).select_traces({"mode": "markers+text"})]
    assert numbered == [False], "the first layer's number stands above the panel"


def test_what_was_ablated_has_sections_and_tables(made: ModuleType, tmp_path: Path) -> None:
    run = add_effects(made.make(tmp_path / "ablated", sequences=10, timings=0))
    (path,) = export(ExportOptions(run=run.path, format="html", out=tmp_path))
    heads = re.findall("<h2 [^>]+>([^<]+)</h2>", path.read_text(encoding="utf-8"))
    assert heads[-3:] == ["What matters", "Neurons by effect", "Findings"], "no budget was divided"
    written = export(ExportOptions(run=run.path, out=tmp_path / "tables"))
    assert {"effects", "neuron_effects"} <= {path.stem for path in written}


def test_sections_are_called_as_on_the_dashboard() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in Path(str(files("twell.app"))).rglob("*.py"))
    document_alone = {"Words", "Rank correlation", "Concentration", "Lorenz curve", "Unions"}
    titles = {section.title for section in (*SECTIONS, *ABLATIONS)} - document_alone
    assert [title for title in titles if f'"{title}"' not in pages] == []


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
    assert all(source.startswith((IMAGE, "#")) for source in page.loads), (
        "the figures of claims, and no image of a token's"
    )


@pytest.mark.usefixtures("without_images")
def test_a_poor_run_has_a_page_and_a_notebook(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(
        tmp_path / "poor", layers=1, sequences=6, length=5, parts=1, neurons=False, tiles=False, timings=0, loss=False
    )
    for ending in ("html", "ipynb"):
        (path,) = export(ExportOptions(run=run.path, out=tmp_path / f"poor.{ending}"))
        assert "findings" in path.read_text(encoding="utf-8").lower()


def test_what_a_model_wrote_it_has_not_read(made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "written", sequences=4, parts=1)
    tokens = plural(run.manifest.tokens, "token")
    assert f" read {tokens}. " in introduction(run, overview(run)) and "generated" not in card(run)
    run.manifest.options["generate"] = 8
    assert f" read and wrote {tokens}. " in introduction(run, overview(run))
    assert " nats, generated tokens among them" in card(run)


def test_a_threshold_skips_nothing(small: Run) -> None:
    """What stays below it is no zero, and is computed all the same."""
    numbers = overview(small)
    assert "give zeros, which a sparse kernel skips" in introduction(small, numbers)
    small.manifest.options["threshold"] = 0.05
    said = introduction(small, numbers)
    assert (
        said.endswith("have values of at most 0.05 in size, and the model ran densely, as it is.")
        and "skip" not in said
    )


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
        loaded, (expected, _) = scipy.sparse.load_npz(path), fired_csr(run, layer)
        assert (loaded != expected).nnz == 0
        assert loaded.shape == expected.shape
    (path,) = export(ExportOptions(run=run.path, table=("dead_neurons",), format="npz", out=tmp_path / "dead.npz"))
    np.testing.assert_array_equal(np.load(path)["dead"], dead_mask(run))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dead.npz", "fired"]


def test_refused(run: Run, bos_run: Run, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no --table with --format html"):
        export(ExportOptions(run=run.path, table=("by_layer",), format="html", out=tmp_path / "x"))
    with pytest.raises(UserError, match="with --format npz, got --table by_layer: other"):
        export(ExportOptions(run=run.path, table=("by_layer",), format="npz", out=tmp_path / "x"))
    with pytest.raises(Missing, match="no sample of firings: capture with --fired"):
        export(ExportOptions(run=bos_run.path, table=("fired",), format="npz", out=tmp_path / "x"))
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="choose a place"):
        export(ExportOptions(run=run.path, format="html", out=tmp_path / "file" / "x.html"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
