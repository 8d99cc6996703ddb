"""The Neurons page, and the page of one neuron."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest

from twell.analysis import by_neuron, examples
from twell.app.neuron_data import density_bins, neuron_list, parse
from twell.app.words import number, percent, whole
from twell.workbench.store import Run

Show = Callable[..., AppTest]


def markup(test: AppTest) -> str:
    return "\n".join(str(element.proto.body) for element in test.get("html"))


def test_every_neuron_is_in_one_bin_of_its_layer(made_run: Run) -> None:
    bins, neurons = density_bins(made_run), by_neuron(made_run)
    assert (bins.groupby("layer")["neurons"].sum() == made_run.d_ff).all()
    for row in bins.itertuples():
        density = neurons.loc[neurons["layer"] == row.layer, "density"]
        inside = density == 0 if row.low == 0 else (density >= row.low) & (density < row.high + 1e-9 * (row.high == 1))
        assert inside.sum() == row.neurons


def test_lists_hold_their_kind_foremost_first(made_run: Run) -> None:
    every = by_neuron(made_run)
    hot, count = neuron_list(made_run, None, "hot")
    assert count == (every["fires"] > 0).sum()
    assert hot["density"].iloc[0] == every["density"].max()
    rare, _ = neuron_list(made_run, 2, "rare")
    assert set(rare["layer"]) == {2}
    assert rare["fires"].iloc[0] == every.loc[(every["layer"] == 2) & (every["fires"] > 0), "fires"].min()
    dead, count = neuron_list(made_run, None, "dead")
    assert count == (every["fires"] == 0).sum() > 0
    assert (dead["fires"] == 0).all()
    one, _ = neuron_list(made_run, None, "one")
    assert one["one_token"].all()
    assert (one["token_text"] != "").all()


@pytest.mark.parametrize(
    ("label", "place"),
    [("L2/N7", (2, 7)), (" l2/n7 ", (2, 7)), ("2/7", (2, 7)), ("L9/N7", None), ("L2/N512", None), ("<b>", None)],
)
def test_a_neuron_is_named_by_layer_and_index(made_run: Run, label: str, place: tuple[int, int] | None) -> None:
    assert parse(label, made_run) == place


def test_the_list_follows_the_address_and_the_field_leads_to_a_neuron(show: Show, runs: Path) -> None:
    test = show(runs, "neurons", run="made", kind="dead", layer="L1")
    assert not test.exception
    assert (test.dataframe[0].value["fires"] == 0).all()
    assert set(test.dataframe[0].value["layer"]) == {1}
    test.text_input(key="go").set_value("L99/N1").run()
    assert "No such neuron" in markup(test)


def test_a_neuron_shows_its_numbers_and_examples(show: Show, runs: Path, made_run: Run) -> None:
    test = show(runs, "neuron", run="made", neuron="L1/N3")
    assert not test.exception
    shown = markup(test)
    neuron = by_neuron(made_run, layer=1).iloc[3]
    assert f"<b>{percent(neuron['density'])}</b>" in shown
    assert f"fires on {whole(neuron['fires'])} of" in shown
    assert f"<b>{number(neuron['value_max'])}</b>" in shown
    found = examples(made_run, 1, 3)
    places = re.findall(r'class="where" href="[^"]*">(\d+:\d+)</a>', shown)
    assert places == [f"{r.sequence}:{r.position}" for r in found.itertuples()]
    assert shown.count('class="here"') == len(found)
    assert len(test.get("plotly_chart")) == 2


def test_shades_of_an_example_follow_its_window(show: Show, runs: Path, made_run: Run) -> None:
    shown = markup(show(runs, "neuron", run="made", neuron="L1/N3"))
    first = examples(made_run, 1, 3).iloc[0]
    line = shown.split('class="tw-example"')[1]
    tips = re.findall(r'title="([^"]*)"', line)
    window = np.asarray(first["window"], dtype=float)
    low = max(0, 16 - int(first["position"]))
    assert tips[: len(tips)] == [number(v) for v in window[low : low + len(tips)] if v > 0][: len(tips)]
    assert number(float(first["value"])) in tips


def test_a_run_without_examples_says_how_to_keep_some(show: Show, runs: Path) -> None:
    for run in ("oracle", "summary"):
        test = show(runs, "neuron", run=run, neuron="L0/N1")
        assert not test.exception
        assert "--examples" in test.info[-1].value.replace("\\", "")


def test_a_neuron_that_is_not_there_is_said(show: Show, runs: Path) -> None:
    for name in ("L77/N0", "x", "<script>"):
        test = show(runs, "neuron", run="made", neuron=name)
        assert "No such neuron" in markup(test)
        assert "<script>" not in markup(test)


def test_a_run_without_the_neurons_probe_says_so(show: Show, runs: Path) -> None:
    test = show(runs, "neurons", run="counts")
    assert not test.exception
    assert test.info
