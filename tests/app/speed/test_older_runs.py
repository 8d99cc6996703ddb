"""Timings of runs that were recorded before every call was timed, and of the least captures: shown as what they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from support.page_elements import markup, notices

from twell.analysis.figures.speed.live import sparse_calls, tokens_per_second
from twell.app.jobs.live_view import live_numbers
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run

Show = Callable[..., AppTest]
Table = dict[str, Any]


def kept(table: Table, chosen: Any) -> Table:
    """Return the rows of a table that are chosen, without the columns that came later."""
    rows = {name: np.ma.asarray(values)[chosen] for name, values in table.items()}
    missing = np.ma.masked_all(len(rows["batch"]), dtype=np.float32)
    return {**rows, "seconds": missing, "load": missing}


def one_layer_once(table: Table) -> Table:
    """What a capture timed by default before: one layer of all, in one batch, beside no pass of the model."""
    return kept(table, (np.asarray(table["layer"]) == 0) & (np.asarray(table["batch"]) == 0))


@pytest.fixture
def older(made: ModuleType, tmp_path: Path) -> Run:
    return made.make(tmp_path / "older", layers=6, sequences=10, change_timings=one_layer_once)


def test_one_layer_timed_once_is_named_wherever_its_speed_stands(show: Show, older: Run) -> None:
    front, kernels = (show(older.path.parent, page, run="older") for page in ("overview", "kernels"))
    assert any("layer 0 alone" in said.value for said in kernels.markdown)
    front, kernels = markup(front), markup(kernels)
    assert "Timed once, in layer 0 alone, that ran" in front
    assert "the other layers were not timed" in front
    assert "That made this part of the model" not in front
    assert "Layer 0 alone was timed" in front and "smallest in layer" not in front
    assert "Timed once, so how much it varies is not known" in kernels
    assert "Only 1 of 6 layers were timed" in kernels


def test_what_it_did_not_time_has_no_figure(show: Show, older: Run) -> None:
    test = show(older.path.parent, "kernels", run="older")
    assert not test.exception
    shown = {chart.key for chart in test.get("plotly_chart")}
    assert "layer-times" in shown
    assert not shown & {"calls", "batches", "time-split", "potential"}
    assert sparse_calls(older).empty
    assert np.isnan(tokens_per_second(older))


def test_some_layers_of_several_turns_are_named(show: Show, made: ModuleType, tmp_path: Path) -> None:
    def some(table: Table) -> Table:
        return kept(table, np.isin(np.asarray(table["layer"]), [0, 1, 2]))

    made.make(tmp_path / "some", layers=6, sequences=10, change_timings=some)
    assert "Timed, in layers 0-2 alone, that ran" in markup(show(tmp_path, run="some"))


def test_layers_that_ran_dense_on_part_of_a_batch(show: Show, made: ModuleType, tmp_path: Path) -> None:
    """Their times are scaled, and the words say so."""

    def part(table: Table) -> Table:
        tokens = np.asarray(table["tokens"])
        return {**table, "tokens": np.where(np.asarray(table["op"]) == "ffn_dense", 100, tokens).astype(tokens.dtype)}

    made.make(tmp_path / "part", sequences=10, change_timings=part)
    made.make(tmp_path / "all", sequences=10)
    assert "scaled by the row: dense ran on the first 100 rows of a batch, sparse on " in markup(
        show(tmp_path, "kernels", run="part")
    )
    assert "dense ran on" not in markup(show(tmp_path, "kernels", run="all"))


def test_a_capture_of_one_batch_of_one_layer(show: Show, made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "one", layers=1, sequences=4, timings=1)
    for page in ("overview", "kernels"):
        assert not show(tmp_path, page, run="one").exception
    shown = {name: (value, said) for name, value, said in live_numbers(run)}
    assert shown["Tokens per second"][0] == "\N{EN DASH}"
    assert shown["Sparse calls timed"][0] == "1"
    assert "the only layer" in shown["FFN speedup so far"][1]
    assert "Timed once" in shown["FFN speedup so far"][1]


def test_a_count_above_a_threshold_is_not_told_to_time_itself(show: Show, made: ModuleType, tmp_path: Path) -> None:
    """Its model ran densely: no option of the capture times it."""
    run = made.make(tmp_path / "counted", sequences=4, timings=0)
    manifests.write(run.path, replace(run.manifest, options=run.manifest.options | {"threshold": 0.01}))
    said = notices(show(tmp_path, "kernels", run="counted"))
    assert "No layer has been timed: it counts what is above a threshold" in said and "--timings" not in said
