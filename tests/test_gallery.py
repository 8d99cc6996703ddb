"""The notebooks of data/notebooks: their code runs, and what is committed is of that code, with figures as images."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from support.gallery import checksum, code_cells, notebooks, run

PATHS = {path.stem: path for path in notebooks()}
PNG = b"\x89PNG\r\n\x1a\n"


def read(path: Path) -> dict[str, Any]:
    book: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return book


def test_the_gallery_is_whole() -> None:
    assert set(PATHS) == {
        "does_my_training_get_sparse",
        "how_sparse_is_an_ordinary_silu_model",
        "watch_your_own_model",
        "which_neurons_does_this_token_fire",
    }


@pytest.mark.parametrize("name", PATHS)
def test_a_notebook_runs_and_shows_what_is_committed(name: str) -> None:
    """Each cell that shows something now has an output of the same kind in the file."""
    book = read(PATHS[name])
    for cell, shown in zip(code_cells(book), run(book), strict=True):
        kinds = set().union(*(output.get("data", {}) for output in cell["outputs"]))
        assert bool(shown.printed) == any(output["output_type"] == "stream" for output in cell["outputs"])
        assert (shown.value is not None) == bool(kinds)
        assert ("image/png" in kinds) == (
            hasattr(shown.value, "to_plotly_json") or "ShadedText" in str(type(shown.value))
        )


@pytest.mark.parametrize("name", PATHS)
def test_what_is_committed_shows_on_a_code_host(name: str) -> None:
    """Outputs are of these cells, a figure is a PNG, and nothing tells of the machine that made them."""
    text = PATHS[name].read_text(encoding="utf-8")
    book = json.loads(text)
    assert book["metadata"]["twell"]["cells"] == checksum(book), "run PYTHONPATH=tests python -m support.gallery"
    data = [output.get("data", {}) for cell in code_cells(book) for output in cell["outputs"]]
    images = [base64.b64decode(one["image/png"]) for one in data if "image/png" in one]
    assert images and all(image.startswith(PNG) and len(image) > 4000 for image in images)
    assert len(text) < 300_000
    assert not [path for path in ("/home", "/root", "/tmp", "/usr", "/work", "twell-capture") if path in text]
