"""Figures that are kept: the same one for the same content, and never that of other rows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from streamlit.testing.v1 import AppTest

from twell.analysis import memo
from twell.analysis.figures.speed.live import SHADES
from twell.analysis.memo import built_once
from twell.app.server import warm_up
from twell.app.ui.run_cache import digest, open_cached
from twell.app.ui.theme import SETTINGS
from twell.workbench.run.store import Run

START = warm_up._start_thread  # before the fixtures put it aside
TABLE = pd.DataFrame({"x": [1.0, 2.0], "name": ["a", "b"], "none": [None, "c"]})


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> OrderedDict[Any, Any]:
    """No figure yet."""
    monkeypatch.setattr(memo, "_kept", OrderedDict())
    return memo._kept


def build(table: pd.DataFrame, *_: Any) -> go.Figure:
    return go.Figure(go.Scatter(x=table["x"], text=table.get("name")), layout={"title": str(table.attrs)})


def other(table: pd.DataFrame, *_: Any) -> go.Figure:
    return go.Figure(go.Bar(x=table["x"]))


def cell_map(table: pd.DataFrame, cells: np.ndarray) -> go.Figure:
    return go.Figure(go.Heatmap(x=table["x"], z=cells, colorbar={"tickvals": np.array([1, 2])}))


def noted(table: pd.DataFrame, **attrs: Any) -> pd.DataFrame:
    table.attrs = attrs
    return table


def test_the_same_content_is_drawn_once(kept: OrderedDict[Any, Any]) -> None:
    one = built_once(build, TABLE.copy(), 3, ("a", None), {"k": 1.5}, np.arange(3), other)
    assert built_once(build, TABLE.copy(), 3, ("a", None), {"k": 1.5}, np.arange(3), other) is one
    assert built_once(build, noted(TABLE.copy(), mean=float("nan"))) is built_once(
        build, noted(TABLE.copy(), mean=float("nan"))
    )
    assert len(kept) == 2


@pytest.mark.parametrize(
    "changed",
    [
        TABLE.assign(x=[1.0, 3.0]),
        TABLE.assign(name=["a", "c"]),
        TABLE.rename(columns={"name": "text"}),
        TABLE.astype({"x": "float32"}),
        TABLE[::-1],
        TABLE.head(1),
        TABLE.assign(more=1),
        noted(TABLE.copy(), note="timed once"),
        noted(TABLE.copy(), beside=TABLE),
    ],
)
def test_other_content_is_drawn_anew(kept: OrderedDict[Any, Any], changed: pd.DataFrame) -> None:
    one = built_once(build, TABLE)
    anew = built_once(build, changed)
    assert list(anew.data[0].x) == list(build(changed).data[0].x)
    assert anew is not one and anew.layout.datarevision != one.layout.datarevision and len(kept) == 2


def test_a_kept_figure_holds_lists(kept: OrderedDict[Any, Any]) -> None:
    """Arrays with a type of their own always count as changed, and are drawn twice."""
    cells = np.array([[1, 2.00000001], [np.nan, 1e-30]], np.float64)
    trace = built_once(cell_map, TABLE, cells).to_dict()["data"][0]
    assert trace["x"] == [1.0, 2.0] and trace["z"] == [[1.0, 2.0], [None, 1e-30]]
    assert trace["colorbar"]["tickvals"] == [1, 2]


@pytest.mark.parametrize("more", [[1], [1.0], ["1"], [np.arange(2)], [np.arange(2.0)], [(1,)], [[1]], [None], [other]])
def test_other_arguments_and_functions_are_drawn_anew(kept: OrderedDict[Any, Any], more: list[Any]) -> None:
    built_once(build, TABLE)
    built_once(build, TABLE, *more)
    assert len(kept) == 2
    assert built_once(other, TABLE, *more).data[0].type == "bar" and len(kept) == 3


def test_what_has_no_content_to_compare_is_drawn_each_time(kept: OrderedDict[Any, Any]) -> None:
    for argument in (lambda: 1, object(), np.array([object()]), TABLE.assign(lists=[[1], [2]])):
        assert built_once(build, TABLE, argument) is not built_once(build, TABLE, argument)
    assert not kept


def test_the_oldest_figure_goes_first(kept: OrderedDict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memo, "MOST", 2)
    first, second = built_once(build, TABLE, 1), built_once(build, TABLE, 2)
    assert built_once(build, TABLE, 1) is first  # now the second is the one that was not asked for the longest
    built_once(build, TABLE, 3)
    assert len(kept) == 2 and built_once(build, TABLE, 1) is first and built_once(build, TABLE, 2) is not second


def test_pages_find_their_first_figures(
    show: Callable[..., AppTest], runs: Path, made_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = set()

    class Noted(OrderedDict[Any, Any]):
        def __getitem__(self, key: Any) -> Any:
            used.add(key)
            return super().__getitem__(key)

    for name in ("PAUSE", "GAP"):
        monkeypatch.setattr(warm_up, name, 0.0)
    monkeypatch.setattr(memo, "_kept", Noted())
    run = open_cached(made_run.path)  # as it is now: other tests may have added to it
    START.__wrapped__(str(run.path), digest(run)).join()
    beforehand = set(memo._kept)
    assert len(beforehand) == len(warm_up.default_figures()) == 5
    for page in ("layers", "positions", "neurons", "tokens"):
        assert not show(runs, page, run="made").exception
    assert beforehand <= used, "built beforehand and used by no page"


def test_the_line_of_every_layer_is_seen_in_both_themes() -> None:
    """The shades of the first and the last layer stand out from the page, by WCAG's ratio of luminances."""

    def luminance(rgb: tuple[int, ...]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in rgb)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for theme in ("light", "dark"):
        page = str(SETTINGS[f"theme.{theme}.backgroundColor"]).lstrip("#")
        ground = luminance(tuple(bytes.fromhex(page)))
        for shade in SHADES:
            lower, higher = sorted((ground, luminance(shade)))
            assert (higher + 0.05) / (lower + 0.05) > 2.2, (theme, shade)
