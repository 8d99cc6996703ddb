"""A run in which nothing fires: pages say so, and leave out what has no number. Cost: 3 s."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from support.page_elements import markup

from twell.analysis import by_layer
from twell.analysis.exports.command import export
from twell.analysis.figures.layers import nnz_bins, ridges
from twell.analysis.passage import passage
from twell.app.text.token_view import draw_way_to_neurons
from twell.workbench.options import ExportOptions
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import open_run

LAYERS = 3
SAID = {
    "overview": "No neuron of any layer fires on any of",
    "text": "By neurons over all layers, every counted token of none has 0: none has the highest value.",
    "tokens": "",
    "layers": "fires no neuron on tokens that have a loss",
    "positions": "fires no neuron past the first position",
    "findings": "there is no mean to compare the fullest token with",
    "compare": "One of these runs fires no neuron",
}


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory, made: ModuleType) -> Path:
    """A folder of a run in which nothing fires, as with a threshold that is too large, and of one like others."""

    def nothing(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {name: np.zeros_like(columns[name]) for name in nnz_columns(LAYERS)}

    folder = tmp_path_factory.mktemp("silent")
    given = {"layers": LAYERS, "sequences": 40, "timings": 0, "neurons": False, "tiles": False}
    made.make(folder / "none", change=nothing, **given)
    made.make(folder / "some", **given)
    made.make(folder / "timed", change=nothing, **given | {"timings": 3})
    return folder


@pytest.mark.parametrize("page", SAID)
def test_a_page_says_what_there_is(page: str, silent: Path, show: Callable[..., AppTest]) -> None:
    test = show(silent, page, run="none")
    assert not test.exception
    blocks = [str(block.proto.body) for kind in ("html", "info") for block in test.get(kind)]
    text = re.sub(r"\\(.)", r"\1", " ".join(blocks))  # Markdown's escapes
    assert SAID[page] in text
    assert not re.search(r"\bnan\b", text, re.IGNORECASE)


def test_speedups_without_a_count_have_no_heading_alone(silent: Path, show: Callable[..., AppTest]) -> None:
    test = show(silent, "kernels", run="timed")
    assert "Speedup and activity" not in markup(test)
    assert any("there is no nnz to draw the speedup against" in info.value for info in test.info)


def test_zeros_alone_are_a_peak_at_zero_without_a_share(silent: Path) -> None:
    run = open_run(silent / "none")
    figure = ridges(nnz_bins(run), by_layer(run))
    assert max(x for x in figure.data[0].x if x is not None) < 1
    (bars,) = [trace for trace in figure.data if trace.type == "bar"]
    assert list(bars.text) == ["0"] * LAYERS


def test_no_token_is_said_to_fire_most(silent: Path, show: Callable[..., AppTest], monkeypatch: Any) -> None:
    assert "fires most here" not in markup(show(silent, "text", run="none"))
    said: list[str] = []
    monkeypatch.setattr("streamlit.html", said.append)
    rows = passage(open_run(silent / "none"), 0)
    for marked in (None, 3):
        draw_way_to_neurons(rows, ["a"] * len(rows), marked, {})
    assert "None of these tokens fires a neuron." in said[0] and "at position 3 fires no neuron." in said[1]


@pytest.mark.parametrize("view", ["words", "tokens", "classes"])
def test_tokens_that_fire_nothing_are_listed(view: str, silent: Path, show: Callable[..., AppTest]) -> None:
    test = show(silent, "tokens", run="none", view=view)
    assert not test.exception and test.get("plotly_chart")


def test_no_correlation_has_axes_alone(silent: Path, show: Callable[..., AppTest]) -> None:
    titles = (
        "Activity and surprise within tokens",
        "Expected and actual surprise",
        "Layers that are busy on the same tokens",
    )
    shown = markup(show(silent, "layers", run="none"))
    listed = "; ".join(title[0].lower() + title[1:] for title in titles)
    assert f"Left out: {listed}. What they correlate does not vary in this run." in shown
    assert not any(title in shown for title in titles)


def test_a_run_that_fires_is_compared_with_one_that_does_not(silent: Path, show: Callable[..., AppTest]) -> None:
    assert not show(silent, "compare", run="some", **{"with": "none"}).exception


@pytest.mark.parametrize(("run", "said"), [("none", ""), ("timed", "No neuron fires in the timed batches")])
def test_an_exported_page_has_no_nan(run: str, said: str, silent: Path, tmp_path: Path) -> None:
    export(ExportOptions(run=silent / run, out=tmp_path / "none.html"))
    page = re.sub("<script.*?</script>", "", (tmp_path / "none.html").read_text("utf-8"), flags=re.DOTALL)
    assert "fires no neuron past the first position" in page and said in page
    assert not re.search(r"\bnan\b", page, re.IGNORECASE)
