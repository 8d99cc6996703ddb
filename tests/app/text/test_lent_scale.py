"""Page Text: a longer run of the same weights lends a short one its scale."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from support.page_elements import markup, shades

from twell.analysis.passage import passage, percentiles, scale
from twell.app.text.passage_view import opacity
from twell.app.ui.formatting import whole
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import open_run

Show = Callable[..., AppTest]


@pytest.fixture
def lending(made: ModuleType, tmp_path: Path) -> Path:
    """A folder with a run, shorter ones of the same weights and of others, and one that lacks its losses."""
    for name, weights, changes in (
        ("long", "a", {"sequences": 60}),
        ("short", "a", {"sequences": 4, "seed": 5}),
        ("stranger", "b", {"sequences": 50}),
        ("unread", "a", {"sequences": 70, "loss": False}),
    ):
        run = made.make(tmp_path / name, layers=3, d_ff=512, **changes)
        manifests.update(run.path, model={**run.manifest.model, "weights": weights})
    return tmp_path


def lenders(test: AppTest) -> list[str]:
    return next((box.options for box in test.selectbox if box.label == "Scale of"), [])


@pytest.mark.parametrize("shade", ["all", "L1", "surprisal"])
def test_a_short_run_is_shaded_by_the_scale_of_a_longer_one(show: Show, lending: Path, shade: str) -> None:
    long, short = open_run(lending / "long"), open_run(lending / "short")
    own = show(lending, "text", run="short", sequence="1", shade=shade)
    lent = show(lending, "text", run="short", sequence="1", shade=shade, scale="long")
    assert lenders(own) == lenders(lent) == ["this run", "long"]
    assert "percentile of the run" in markup(own)
    assert "percentile of long" in markup(lent)
    values = passage(short, 1)[{"all": "nnz", "L1": "nnz_01", "surprisal": "surprisal"}[shade]].to_numpy(float)
    for test, run in ((own, short), (lent, long)):
        drawn = np.array(shades(markup(test)))
        expected = opacity(scale(run, shade).share(values))
        assert np.allclose(drawn, expected, atol=0.006, equal_nan=True)
    counted = np.concatenate([passage(long, n).query("flags == 0")["nnz"].to_numpy() for n in range(60)])
    nnz = int(passage(short, 1)["nnz"].iloc[3])
    percentile = f"percentile {100 * np.mean(counted <= nnz):.0f}"
    assert f"{whole(nnz)} neurons over all layers\n{percentile} of the run" in markup(lent)
    assert all("scale=long" in place for place in re.findall(r'href="(text[^"]*)"', markup(lent)))


def test_only_a_longer_run_of_the_same_weights_lends(show: Show, lending: Path) -> None:
    assert lenders(show(lending, "text", run="long")) == []
    assert lenders(show(lending, "text", run="stranger")) == []
    assert lenders(show(lending, "text", run="unread")) == []
    for name in ("stranger", "unread", "gone", "short"):
        assert "percentile of the run" in markup(show(lending, "text", run="short", scale=name))
    for run in ("long", "short"):  # of a time before manifests named the weights
        manifests.update(lending / run, model={**open_run(lending / run).manifest.model, "weights": None})
    assert lenders(show(lending, "text", run="short")) == []


def test_tokens_that_are_not_counted_have_no_say_in_scales(made: ModuleType, tmp_path: Path) -> None:
    """The first of each sequence, here one of twenty, fires most by far."""

    def loud(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {"nnz_00": np.where(columns["flags"] > 0, 60, columns["nnz_00"] % 40).astype(np.uint16)}

    run = made.make(tmp_path / "run", layers=1, sequences=30, length=20, parts=1, change=loud)
    counted = np.sort(run.activity(flagged=False)["nnz_00"])
    assert scale(run, "L0").high == scale(run, "all").high == counted[int(np.ceil(0.99 * len(counted))) - 1] < 60
    values, shares = percentiles(run)
    assert (values[-1], shares[-1]) == (counted.max(), 100)


TOPS = """() => [...document.querySelectorAll(".stHorizontalBlock:has(.st-key-shade) > div")].map(
  (part) => part.getBoundingClientRect().bottom)"""


def test_all_choices_stand_in_one_row(made: ModuleType, growing_page: Any, growing: tuple[Path, str]) -> None:
    """A run with generated tokens and a lender of its scale has the most of them."""

    def generated(columns: dict[str, Any]) -> dict[str, Any]:
        return columns | {"phase": (columns["position"] >= 40).astype(np.uint8)}

    for name, sequences in (("long", 60), ("short", 4)):
        run = made.make(growing[0] / name, change=generated, layers=3, d_ff=512, sequences=sequences, fired=True)
        manifests.update(run.path, model={**run.manifest.model, "weights": "a"})
    growing_page.open("/text?run=short", ".st-key-phase")
    bottoms = growing_page.page.evaluate(TOPS)
    assert len(bottoms) == 8 and max(bottoms) - min(bottoms) < 2
