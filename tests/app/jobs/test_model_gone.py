"""A run whose model's folder is gone: what was recorded is still answered, and what only the model tells is said."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from support.captures import run_capture, save_model
from support.page_elements import markup, notices

from twell.workbench.run.store import Run

Show = Callable[..., AppTest]
GONE = "not on this machine"


@pytest.fixture(scope="module")
def orphan(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A captured run with examples and every firing, whose model was deleted afterwards."""
    folder = tmp_path_factory.mktemp("orphan")
    (text := folder / "text.txt").write_text("A lichen <b>lives</b> here, and grows on stone. " * 60)
    model = save_model(folder / "model")
    run = run_capture(model, folder / "runs" / "orphan", (str(text),), examples=2, fired="all", probes="all")
    shutil.rmtree(model)
    return run


def strongest(run: Run) -> str:
    rows = run.frame("examples", ["layer", "neuron", "value"])
    row = rows.loc[rows["value"].idxmax()]
    return f"L{int(row['layer'])}/N{int(row['neuron'])}"


def test_recorded_answers_are_left(show: Show, orphan: Run) -> None:
    runs, label = orphan.path.parent, strongest(orphan)
    neuron = show(runs, "neuron", run="orphan", neuron=label)
    assert not neuron.exception
    assert "<b>lives" not in markup(neuron)
    assert re.search(r'class="tw-example\b', markup(neuron))
    assert GONE in notices(neuron) + markup(neuron)
    text = show(runs, "text", run="orphan", position="3")
    assert not text.exception
    assert 'href="neuron?' in markup(text), "its firings were recorded"


@pytest.mark.parametrize(
    ("page", "address"), [("neurons", {"kind": "dead", "near": "True"}), ("matters", {}), ("kernels", {})]
)
def test_what_only_the_model_tells_is_said(show: Show, orphan: Run, page: str, address: dict[str, str]) -> None:
    test = show(orphan.path.parent, page, run="orphan", **address)
    assert not test.exception
    assert GONE in notices(test) + markup(test)
    assert not [switch for switch in test.toggle if "near" in switch.label]


def test_a_relative_path_is_found_from_another_folder(
    show: Show, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text := tmp_path / "text.txt").write_text("A lichen lives here, and grows on stone. " * 9)
    save_model(tmp_path / "models" / "mine")
    monkeypatch.chdir(tmp_path)
    run_capture(Path("models/mine"), tmp_path / "runs" / "typed", (str(text),))
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    test = show(tmp_path / "runs", "matters", run="typed")
    assert not test.exception
    assert GONE not in markup(test)
    assert "Runs the model on 289 tokens from all over this run" in markup(test)
    assert test.button(key="study-start").label == "Measure"
