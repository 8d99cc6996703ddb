"""What each layer could still gain, on a run made to have it, and the bars that show it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from streamlit.testing.v1 import AppTest
from support.page_elements import figure, markup

from twell.analysis import layer_potential, speedup
from twell.analysis.figures.labels import number
from twell.analysis.figures.speed.potential import MOST, bars, gains
from twell.analysis.figures.style import AMBER
from twell.analysis.speed.potential import most_to_gain, worth_speeding_up
from twell.analysis.speed.speedup import of_one_size
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


@pytest.fixture
def timed(made: ModuleType, tmp_path: Path) -> Run:
    """Ten layers of 2 turns, which tell nothing apart."""
    return timed_for(made, tmp_path / "timed", turns=2)


def timed_for(made: ModuleType, path: Path, turns: int, noise: float = 0.0) -> Run:
    """A run of ten layers, gate 10 µs, attention 500 µs each; the model 20 ms dense on twice the rows, 12 ms sparse.

    noise: by how many µs the sparse time of layer 3, 390 µs in the median, is less in the first turn, more in the last
    """

    def change(table: dict[str, Any]) -> dict[str, Any]:
        rows = []
        for batch in range(turns):
            rows += [{"batch": batch, "layer": n, "op": "gate", "microseconds": 10.0} for n in range(10)]
            rows += [{"batch": batch, "layer": n, "op": "attention", "microseconds": 500.0} for n in range(10)]
            for op, time in (("model_dense", 20_000.0), ("model_sparse", 12_000.0)):
                rows.append({"batch": batch, "layer": -1, "op": op, "microseconds": time, "tokens": 4096})
        table = made.more_timings(table, rows)
        loud = (table["layer"] == 3) & (table["op"] == "ffn_sparse")
        off = (table["batch"] == turns - 1).astype(float) - (table["batch"] == 0)
        return {
            **table,
            "microseconds": np.where(loud, 390.0 + noise * off, table["microseconds"]),
            "nnz_mean": np.where(table["layer"] == 3, 60.0, 7.0),
        }

    return made.make(path, layers=10, sequences=10, parts=1, timings=turns, change_timings=change)


def test_what_is_left_in_each_layer(timed: Run) -> None:
    table, frame = layer_potential(timed), speedup(timed)
    np.testing.assert_allclose(table["left_ms"], (frame["sparse_us"] - 10) / 1000)
    np.testing.assert_allclose(table["saved_ms"], (frame["dense_us"] - frame["sparse_us"]) / 1000)
    assert (table.attrs["dense_ms"], table.attrs["sparse_ms"]) == pytest.approx((10.0, 6.0))
    assert table.attrs["attention_ms"] == pytest.approx(5.0)
    np.testing.assert_allclose(table["left_share"], table["left_ms"] / 6.0)
    text = worth_speeding_up(table)
    assert text.startswith("There are too few timings to be sure, but it seems that layer 3 has most")
    assert "to gain: 0.38 ms, 6.3 % of the pass, because it fires 60 neurons a token" in text
    assert text.endswith("attention takes 5 ms, more than they could gain.")
    slow = table.assign(left_ms=10_000 * table["left_ms"])  # as on a processor, of a large model
    slow.attrs = {name: 10_000 * value for name, value in table.attrs.items() if name.endswith("_ms")}
    slow.attrs |= {"turns": 1, "beaten": 0}
    said = worth_speeding_up(slow)
    assert "most to gain: 3,800 ms, 6.3 %" in said and said.endswith(
        "attention takes 50,000 ms, more than they could gain."
    )


def test_one_layer_is_not_compared_with_others(timed: Run) -> None:
    """A model of one layer has no layer with most to gain, and no others that fire as many neurons."""
    table = layer_potential(timed)
    alone = table[table["layer"] == 3]
    alone.attrs = {**table.attrs, "beaten": 0}
    for said in (most_to_gain(alone), worth_speeding_up(alone)):
        assert said.startswith("The only layer that was timed could gain 0.38 ms, 6.3 % of the pass, because it")
        assert "most to gain" not in said and "layers" not in said


def test_a_layer_is_named_alone_where_its_turns_tell_it_from_every_other(made: ModuleType, tmp_path: Path) -> None:
    quiet = layer_potential(timed_for(made, tmp_path / "quiet", turns=4))
    assert most_to_gain(quiet).startswith("Layer 3 has most to gain: 0.38 ms")
    loud = layer_potential(timed_for(made, tmp_path / "loud", turns=4, noise=380.0))
    assert loud["left_ms"].idxmax() == 3
    low, high = loud["behind_low"].to_numpy(), loud["behind_high"].to_numpy()
    alike = [layer for layer in range(10) if layer != 3 and low[layer] <= 0 <= high[layer]]
    assert alike == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    said = "That is not sure: by 4 timed batches, layers 0-2, 4-9 may have as much to gain."
    assert most_to_gain(loud).startswith("Layer 3 has most to gain: 0.38 ms") and most_to_gain(loud).endswith(said)


@pytest.mark.parametrize("turns", [4, 20])
def test_what_is_left_behind_the_first_layer_has_an_interval_over_turns(
    turns: int, made: ModuleType, tmp_path: Path
) -> None:
    """Over ten blocks of turns in a row where there are more of them."""
    run = timed_for(made, tmp_path / "loud", turns=turns, noise=380.0)
    rows = of_one_size(run)
    left = rows[rows["op"] == "ffn_sparse"].pivot(index="batch", columns="layer", values="microseconds") / 1000
    blocks = (left[3] - left[5]).to_numpy().reshape(min(turns, 10), -1).mean(axis=1)
    expected = stats.t.interval(0.95, len(blocks) - 1, blocks.mean(), stats.sem(blocks))
    np.testing.assert_allclose(layer_potential(run).loc[5, ["behind_low", "behind_high"]].astype(float), expected)


def test_a_gate_product_slower_than_sparse_ffns_bounds_nothing(timed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = speedup(timed)
    for slower, bounds in ((5, True), (6, False)):
        slow = frame.assign(gate_us=frame["gate_us"].where(frame["layer"] >= slower, 1000.0))
        monkeypatch.setattr("twell.analysis.speed.potential.speedup", lambda run, slow=slow: slow)
        table = layer_potential(timed)
        assert (table["left_ms"][:slower] == 0).all()
        text = worth_speeding_up(table)
        assert ("All layers together could gain" in text) is bounds
        assert ("took longer than the whole sparse FFN in 6 of 10 layers" in text) is not bounds
        assert "has most to gain" in text


def test_attention_that_took_longer_than_the_pass_is_left_out(timed: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = of_one_size(timed)
    slow = rows.assign(microseconds=rows["microseconds"].where(rows["op"] != "attention", 700.0))
    monkeypatch.setattr("twell.analysis.speed.potential.of_one_size", lambda run: slow)
    table = layer_potential(timed)
    assert np.isnan(table.attrs["attention_ms"]), "7 of 6 ms"
    assert "attention" not in worth_speeding_up(table)


def test_the_layer_with_most_to_gain_stands_first(timed: Run) -> None:
    table = layer_potential(timed)
    rows, figure = bars(table), gains(table)
    assert len(rows) == len(table) == 10 and rows["name"].iloc[0] == "L3"
    assert (rows["left"].diff().dropna() <= 0).all()
    left, saved = figure.data
    assert list(left.x) == list(rows["left"]) and list(saved.x) == list(rows["saved"])
    assert figure.layout.annotations[0].text == "<b>0.380 ms, 6.3\u202f%</b>"
    assert figure.layout.yaxis.range[0] > figure.layout.yaxis.range[1], "the first on top"


def test_of_many_layers_the_rest_share_a_bar_that_is_one_layer_long(timed: Run) -> None:
    table = layer_potential(timed)
    many = pd.concat([table, table.assign(layer=table["layer"] + 10, saved_ms=-1.0)], ignore_index=True)
    many.attrs = table.attrs
    rows, figure = bars(many), gains(many)
    assert bars(many.head(MOST))["name"].str.startswith("L").all(), "one alone shares with none"
    assert len(rows) == MOST and rows["name"].iloc[-1] == "9 more, each"
    assert rows["left"].iloc[-1] <= rows["left"].iloc[-2]
    assert rows["total"].sum() == pytest.approx(many["left_ms"].sum())
    together = rows["total"].iloc[-1]
    assert together == pytest.approx(9 * rows["left"].iloc[-1])
    text = figure.layout.annotations[-1].text
    assert text.startswith(f"{number(together)} ms, ") and text.endswith("in all")
    assert [trace.name for trace in figure.data][-1] == "lost to dense" and min(figure.data[-1].x) == -1.0


def test_without_the_gate_nothing_bounds_a_layer(made: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(Missing):
        layer_potential(made.make(tmp_path / "plain", sequences=10, parts=1))


def test_the_whole_pass_stands_beside_the_ffn_speedup(show: Callable[..., AppTest], timed: Run) -> None:
    kernels = show(timed.path.parent, "kernels", run="timed")
    assert not kernels.exception
    said = " ".join(element.value for element in kernels.markdown).replace("\u202f", " ")
    assert "; the whole pass 1.67 × (2 batches, too few for an interval; a capture of more text" in said
    page = show(timed.path.parent, run="timed")
    overview = markup(page).replace("\u202f", " ")
    assert "a whole pass 1.67 × as fast, in 2 timed batches, too few to tell how much that varies." in overview
    assert "The whole pass 1.67 × (2 batches, too few for an interval; a capture of more text" in overview
    few = "There are too few timings to be sure, but it seems that layer 3"
    said = f"the bar of the layer with most to gain is amber. {few} has most to gain: 0.38 ms"
    assert overview.index("Layer by layer") < overview.index(said) < overview.index("Worth a look")
    *_, speeds = [trace for trace in figure(page, "layer-by-layer")["data"] if trace.get("orientation") == "h"]
    assert [layer for layer, color in enumerate(speeds["marker"]["color"]) if color == AMBER] == [3]
