"""The pages of a run in which no token is counted: a sentence, no sparsity and no division by zero. Cost: 20 s."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from support.page_elements import figure, markup, notices

from twell.app.ui.pages import PAGES
from twell.workbench.run.schema import FLAG_FIRST, FLAG_NOT_FINITE, nnz_columns

LAYERS = 3


def flat(rows: dict[str, Any]) -> dict[str, Any]:
    """Timings of rows that fired nothing."""
    return rows | {"nnz_mean": np.zeros_like(rows["nnz_mean"])}


@pytest.fixture(params=[FLAG_FIRST, FLAG_NOT_FINITE], ids=["first", "not_finite"])
def uncounted(request: pytest.FixtureRequest, made: ModuleType, tmp_path: Path) -> Path:
    """A folder with a run `none`, whose tokens all have one flag."""

    def change(columns: dict[str, Any]) -> dict[str, Any]:
        columns = columns | {"flags": np.full_like(columns["flags"], request.param)}
        if request.param == FLAG_NOT_FINITE:
            columns |= {name: np.zeros_like(columns[name]) for name in nnz_columns(LAYERS)}
        return columns

    timings = flat if request.param == FLAG_NOT_FINITE else None
    made.make(tmp_path / "none", change=change, change_timings=timings, layers=LAYERS, sequences=20)
    return tmp_path


def test_the_first_page_says_why_there_is_no_sparsity(uncounted: Path, show: Callable[..., AppTest]) -> None:
    test = show(uncounted, run="none")
    assert not test.exception
    assert "holds no unflagged token, and so no sparsity" in test.info[0].value
    assert not [element for element in test.get("html") if '<dl class="tw-numbers' in element.proto.body]


@pytest.mark.parametrize("length", [2, 3])
def test_a_text_of_a_token_or_two_says_what_it_has_of_losses(
    length: int, made: ModuleType, tmp_path: Path, show: Callable[..., AppTest]
) -> None:
    """After the first token, which is not counted: of one more the only loss is the first's, of two all is one bin."""

    def short(columns: dict[str, Any]) -> dict[str, Any]:
        columns = {name: values[:length] for name, values in columns.items()}
        columns["flags"] = np.where(np.arange(length) == 0, FLAG_FIRST, 0).astype(np.uint8)
        columns["loss"].mask = np.arange(length) == length - 1
        columns["entropy"].mask = columns["loss"].mask
        return columns

    made.make(tmp_path / "short", change=short, layers=LAYERS, sequences=1, parts=1, timings=0)
    test = show(tmp_path, "layers", run="short")
    assert not test.exception and "--no-loss" not in markup(test) + notices(test)
    if length == 2:
        assert "no token that is counted has a loss" in markup(test)
        return
    (ticks,) = [trace for trace in figure(test, "surprisal")["data"] if trace.get("name") == "x ticks"]
    assert ticks["text"]


@pytest.mark.parametrize("page", [name for name in PAGES if name != "overview"])
def test_no_page_breaks(page: str, uncounted: Path, show: Callable[..., AppTest]) -> None:
    test = show(uncounted, page, run="none", token="40", neuron="L1/N3")
    assert not test.exception, [error.message for error in test.exception]
