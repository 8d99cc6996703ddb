"""The interval of each layer's speedup over its turns, beside the number on every page that rests on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from support.page_elements import markup

from twell.analysis import speedup
from twell.analysis.figures.speed.timings import dense_and_sparse, speedup_by_nnz
from twell.analysis.figures.style import GREY
from twell.workbench.run.store import Run

Show = Callable[..., AppTest]
RATIOS = [[1.86, 0.91, 0.98], [2.0, 2.1, 2.2], [4.0, 4.1, 4.2]]  # of each layer, turn by turn


def timed_for(made: ModuleType, path: Path, turns: int) -> Run:
    """A run of three layers whose sparse FFN takes 100 µs, and whose dense one as much longer as RATIOS says."""

    def change(table: dict[str, Any]) -> dict[str, Any]:
        ratio = np.array(RATIOS)[table["layer"], np.minimum(table["batch"], turns - 1)]
        time = np.where(table["op"] == "ffn_dense", 100 * ratio, 100.0)
        return {**table, "microseconds": time, "tokens": np.full_like(table["tokens"], 2048)}

    return made.make(path, layers=3, sequences=10, parts=1, timings=turns, change_timings=change)


@pytest.fixture
def timed(made: ModuleType, tmp_path: Path) -> Run:
    return timed_for(made, tmp_path / "timed", turns=3)


def test_the_pages_say_which_layers_are_not_told_apart_from_dense(show: Show, timed: Run) -> None:
    overview = markup(show(timed.path.parent, run="timed")).replace("\u202f", " ")
    said = "smallest in layer 0: 1.18 × (0.446 × to 3.14 × with 95 % confidence, not told apart from dense)"
    assert said in overview
    assert "largest in layer 2: 4.10 × (3.86 × to 4.36 × with 95 % confidence)" in overview
    assert "do not tell the two apart" not in overview
    kernels = markup(show(timed.path.parent, "kernels", run="timed")).replace("\u202f", " ")
    assert "At the right: dense / sparse, geometric mean of those batches with its 95 % interval." in kernels
    assert "Not told apart from dense, and grey: layer 0." in kernels


def test_two_turns_have_no_interval_and_no_verdict(show: Show, made: ModuleType, tmp_path: Path) -> None:
    run = timed_for(made, tmp_path / "brief", turns=2)
    table = speedup(run)
    assert table["low"].isna().all()
    np.testing.assert_allclose(table["speedup"], np.sqrt(np.prod(np.array(RATIOS)[:, :2], axis=1)))
    overview = markup(show(tmp_path, run="brief")).replace("\u202f", " ")
    assert "(in 2 batches, too few for an interval)" in overview
    assert "These timings do not tell the two apart." in overview
    kernels = markup(show(tmp_path, "kernels", run="brief")).replace("\u202f", " ")
    assert "of too few batches for an interval: no layer is told apart from dense." in kernels


def test_the_figures_draw_the_intervals(timed: Run) -> None:
    frame = speedup(timed)
    _, *texts = [note.text for note in dense_and_sparse(frame, ratios=True).layout.annotations]
    assert [f"color:{GREY}" in text for text in texts] == [True, False, False]
    assert [text.split('10px">')[1].split("<")[0] for text in texts] == ["0.446–3.14", "1.86–2.36", "3.86–4.36"]
    bars = speedup_by_nnz(frame).data[0].error_y
    by_nnz = frame.sort_values("nnz_mean")
    np.testing.assert_allclose(bars.array, by_nnz["high"] - by_nnz["speedup"])
    np.testing.assert_allclose(bars.arrayminus, by_nnz["speedup"] - by_nnz["low"])
