"""Timings that follow a capture: rows of the open part, each once, and the numbers made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from streamlit.testing.v1 import AppTest
from support.page_elements import markup

from twell.analysis.figures.speed.live import no_calls, sparse_calls, times_and_nnz, tokens_per_second
from twell.app.jobs import live_view
from twell.app.jobs.live_view import live_numbers
from twell.app.ui.run_cache import LiveRun
from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.part_files import LIVE
from twell.workbench.run.store import open_run


@pytest.fixture
def live(made: ModuleType, tmp_path: Path) -> LiveRun:
    """A run that is being recorded: batches 0 to 4 in a part, 3 to 6 beside it; a batch of 1000 tokens each 2 s."""

    def later(table: dict) -> dict:
        rows = [{"batch": batch, "layer": -1, "op": "pass", "microseconds": 1e6} for batch in range(5)]
        table = made.more_timings(table, rows)
        is_pass = table["op"] == "pass"
        return {**table, "seconds": 2.0 * table["batch"], "tokens": np.where(is_pass, 1000, 2048)}

    run = made.make(tmp_path / "live", sequences=10, parts=1, change_timings=later)
    rows = run.arrow("timings").to_pandas()
    more = rows[rows["batch"] >= 3].copy()
    newer = rows[rows["batch"] >= 3].assign(batch=lambda frame: frame["batch"] + 2)
    newer["seconds"] = 2.0 * newer["batch"]
    table = pa.Table.from_pandas(
        pd.concat([more, newer[newer["batch"] > 4]]), schema=run.arrow("timings").schema,
        preserve_index=False,
    )  # fmt: skip
    pq.write_table(table, run.path / LIVE)
    manifests.update(run.path, status=manifests.RECORDING)
    run = open_run(run.path)
    return LiveRun(run.path, run.manifest)


def test_every_batch_stands_once(live: LiveRun) -> None:
    rows = live.frame("timings")
    assert sorted(rows["batch"].unique()) == list(range(7))
    assert not rows.duplicated(["batch", "layer", "op"]).any()
    assert live.has("timings") and not open_run(live.path).has("bench")


def test_numbers_follow(live: LiveRun) -> None:
    assert tokens_per_second(live) == pytest.approx(500)
    numbers_now = {name: value for name, value, _ in live_numbers(live)}
    assert numbers_now["Tokens per second"] == "500"
    assert numbers_now["Sparse calls timed"] == str(7 * live.layers)
    assert numbers_now["FFN speedup so far"] != "–"


def test_milliseconds_stand_above_nnz_on_one_axis(live: LiveRun) -> None:
    table = sparse_calls(live)
    assert len(table) == 7 * live.layers
    rows = live.frame("timings").query("op == 'ffn_sparse' and layer == 1").sort_values("seconds")
    mine = table[table["layer"] == 1]
    np.testing.assert_allclose(mine["ms"], rows["microseconds"] / 1000)
    np.testing.assert_allclose(mine["nnz_mean"], rows["nnz_mean"])
    figure = times_and_nnz(table)
    assert len(figure.data) == 2 * live.layers
    assert list(figure.data[0].x) == list(figure.data[1].x)
    assert figure.layout.xaxis2.rangemode == "normal"
    alone = table[table["seconds"] == table["seconds"].min()]
    assert times_and_nnz(alone).layout.xaxis2.rangemode == "tozero", "a single moment has no span of its own"


def test_before_the_first_batch_its_axes_stand_there(
    show: Callable[..., AppTest], made: ModuleType, tmp_path: Path
) -> None:
    """Of a capture that has timed nothing yet; once it has, the same figure has lines."""
    run = made.make(tmp_path / "begun", layers=3, sequences=4, timings=0)
    manifests.update(run.path, status=manifests.RECORDING)
    test = show(tmp_path, "kernels", run="begun")
    assert not test.exception
    assert "Times appear here with the first batch" in markup(test)
    assert [chart.key for chart in test.get("plotly_chart")] == ["calls"]
    assert not times_and_nnz(no_calls()).data
    timed = made.make(tmp_path / "timed", layers=3, sequences=4, timings=1)
    pq.write_table(timed.arrow("timings"), run.path / LIVE)
    test = show(tmp_path, "kernels", run="begun")
    assert not test.exception
    assert "Times appear here" not in markup(test)
    assert "Sparse calls timed" in markup(test)
    front = markup(show(tmp_path, "overview", run="begun"))
    said = [front.index(text) for text in ("How sparse is this model", "Sparse calls timed", "In each of its")]
    assert said == sorted(said), "under the title"


def test_a_run_that_has_ended_has_no_other_rows(live: LiveRun) -> None:
    manifests.update(live.path, status=manifests.COMPLETE)
    run = open_run(live.path)
    assert LiveRun(run.path, run.manifest).frame("timings").equals(run.frame("timings"))


def test_what_goes_wrong_stands_there_as_text(
    live: LiveRun, show: Callable[..., AppTest], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path) -> None:
        raise UserError("Expected a run, got <b>none</b>: see `twell check`.")

    monkeypatch.setattr(live_view, "open_cached", broken)
    page = markup(show(live.path.parent, "kernels", run="live"))
    assert "got &lt;b&gt;none&lt;/b&gt;: see <code>twell check</code>." in page
