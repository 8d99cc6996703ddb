"""The Neurons page, and the page of one neuron."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest
from support.browser_pages import Watched
from support.page_elements import markup
from support.rewritten import forget_checksums

from twell.analysis import by_neuron, examples
from twell.analysis.figures.neurons import density_map
from twell.analysis.neurons.by_neuron import parse_neuron
from twell.analysis.neurons.coactivation import fired_csr, fires_with
from twell.analysis.neurons.top_tokens import top_tokens
from twell.app.neurons.neuron_data import density_bins, neuron_list
from twell.app.tokens.token_neurons import neurons_of
from twell.app.ui.formatting import number, percent, plural, visible, whole
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run, open_run

Show = Callable[..., AppTest]


def test_every_neuron_is_in_one_bin_of_its_layer(made_run: Run) -> None:
    bins, neurons = density_bins(made_run), by_neuron(made_run)
    assert (bins.groupby("layer")["neurons"].sum() == made_run.d_ff).all()
    for row in bins.itertuples():
        density = neurons.loc[neurons["layer"] == row.layer, "density"]
        inside = density == 0 if row.low == 0 else (density >= row.low) & (density < row.high + 1e-9 * (row.high == 1))
        assert inside.sum() == row.neurons


def test_lists_hold_their_kind_foremost_first(made_run: Run) -> None:
    every = by_neuron(made_run)
    selective = neuron_list(made_run, None, "selective", most=None)
    chosen = every[(every["density"] <= 0.01) & (every["fires"] >= 8)]
    assert set(selective["label"]) == set(chosen["label"]) and len(chosen) > 1
    assert selective["value_max"].is_monotonic_decreasing
    hot = neuron_list(made_run, None, "hot")
    assert hot.attrs["count"] == (every["fires"] > 0).sum()
    assert hot["density"].iloc[0] == every["density"].max()
    rare = neuron_list(made_run, 2, "rare")
    assert set(rare["layer"]) == {2}
    assert rare["fires"].iloc[0] == every.loc[(every["layer"] == 2) & (every["fires"] > 0), "fires"].min()
    dead = neuron_list(made_run, None, "dead")
    assert dead.attrs["count"] == (every["fires"] == 0).sum() > 0
    assert (dead["fires"] == 0).all()
    one = neuron_list(made_run, None, "one")
    assert one["one_token"].all()
    assert (one["token_text"] != "").all()


def test_a_bin_of_the_map_lists_its_neurons(show: Show, runs: Path, made_run: Run) -> None:
    every, bins = by_neuron(made_run), density_bins(made_run)
    for bin_ in bins[bins["low"] > 0].itertuples():
        assert len(neuron_list(made_run, bin_.layer, "hot", density=(bin_.low, bin_.high))) == bin_.neurons
    cell = bins[bins["low"] > 0].sort_values("neurons").iloc[-1]
    test = show(runs, "neurons", run="made", kind="hot", layer=f"L{cell['layer']:.0f}", density=f"{cell['low']:g}")
    listed = test.dataframe[0].value
    inside = (every["layer"] == cell["layer"]) & every["density"].between(cell["low"], cell["high"], inclusive="left")
    assert set(listed["label"]) == set(every.loc[inside, "label"]) and len(listed) == cell["neurons"]
    assert f"{plural(cell['neurons'], 'neuron')} in layer {cell['layer']:.0f} with a density of" in markup(test)
    dead = show(runs, "neurons", run="made", kind="dead", layer="L1", density=f"{cell['low']:g}")
    assert len(dead.dataframe[0].value) and "density" not in [box.key for box in dead.selectbox], "they have none"


@pytest.mark.parametrize("corner", [0.06, 0.94])
def test_a_click_anywhere_in_a_cell_lists_what_it_holds(watched: Watched, made_run: Run, corner: float) -> None:
    map_of_cells = density_map(density_bins(made_run)).data[0]
    (layers, columns), lows = np.shape(map_of_cells.z), sorted(set(density_bins(made_run)["low"]))
    watched.open("/neurons?run=made", ".js-plotly-plot .heatmaplayer image")
    box = watched.page.locator(".js-plotly-plot .heatmaplayer image").bounding_box()
    column, layer = columns - 2, layers - 2
    across, down = (column + corner) / columns, (layer + 1 - corner) / layers
    watched.page.mouse.click(box["x"] + across * box["width"], box["y"] + down * box["height"])
    watched.page.wait_for_url(f"**/neurons?run=made&layer=L{layer}&kind=hot&density={lows[column]:g}")
    watched.check()


@pytest.mark.parametrize(
    ("label", "place"),
    [("L2/N7", (2, 7)), (" l2/n7 ", (2, 7)), ("2/7", (2, 7)), ("L9/N7", None), ("L2/N512", None), ("<b>", None)],
)
def test_a_neuron_is_named_by_layer_and_index(made_run: Run, label: str, place: tuple[int, int] | None) -> None:
    assert parse_neuron(label, made_run) == place


def test_the_list_follows_the_address_and_the_field_leads_to_a_neuron(show: Show, runs: Path) -> None:
    test = show(runs, "neurons", run="made", kind="dead", layer="L1")
    assert not test.exception
    assert (test.dataframe[0].value["fires"] == 0).all()
    assert set(test.dataframe[0].value["layer"]) == {1}
    assert list(test.dataframe[0].proto.column_order) == ["label"], "no None and no −1"
    assert "fires" in show(runs, "neurons", run="made").dataframe[0].proto.column_order
    test.text_input(key="go").set_value("L99/N1").run()
    assert "No such neuron" in markup(test)


def test_every_neuron_has_the_tokens_at_its_largest_values(show: Show, runs: Path, made_run: Run) -> None:
    table = top_tokens(made_run)
    kept = examples(made_run, 1, 3)
    own = table[(table["layer"] == 1) & (table["neuron"] == 3)]
    assert own["text"].tolist() == list(dict.fromkeys(kept.loc[kept["kind"] == "top", "token"]))[:4]
    listed = show(runs, "neurons", run="made", kind="hot").dataframe[0].value
    row = listed[listed["label"] == "L1/N3"].iloc[0]
    assert row["fires_on"] == "  ".join(map(visible, own["text"]))
    wanted = own["text"].iloc[0]
    on_page = show(runs, "neurons", run="made", kind="hot", find=wanted).dataframe[0].value
    assert "L1/N3" in set(on_page["label"])
    assert on_page["fires_on"].str.lower().str.contains(visible(wanted).lower(), regex=False).all()


def test_neurons_fire_with_those_that_share_their_tokens(made_run: Run) -> None:
    matrix = (fired_csr(made_run, 2)[0] != 0).toarray()
    busiest = int(matrix.sum(axis=0).argmax())
    frame = fires_with(made_run, 2, busiest)
    assert len(frame)
    assert frame.attrs["source"] == "fired"
    for row in frame.itertuples():
        assert row.shared == (matrix[:, busiest] & matrix[:, row.neuron]).sum()
        assert row.phi == pytest.approx(np.corrcoef(matrix[:, busiest], matrix[:, row.neuron])[0, 1])
    parts = [part for part in made_run.manifest.parts if part.table != "fired"]
    unsampled = Run(made_run.path, replace(made_run.manifest, parts=parts))
    frame = fires_with(unsampled, 0, 3)
    assert frame.attrs["source"] == "examples"
    places = unsampled.frame("examples", ["layer", "neuron", "sequence", "position"]).drop_duplicates()
    keys = {key: set(zip(g["sequence"], g["position"], strict=True)) for key, g in places.groupby(["layer", "neuron"])}
    for row in frame.itertuples():
        assert row.shared == len(keys[0, 3] & keys[row.layer, row.neuron])


def test_a_neuron_shows_its_numbers_and_examples(show: Show, runs: Path, made_run: Run) -> None:
    test = show(runs, "neuron", run="made", neuron="L1/N3")
    assert not test.exception
    html = markup(test)
    neuron = by_neuron(made_run, layer=1).iloc[3]
    assert f"<b>{percent(neuron['density'])}</b>" in html
    assert f"fires on {whole(neuron['fires'])} of" in html
    assert f"<b>{number(neuron['value_max'])}</b>" in html
    kept = examples(made_run, 1, 3)
    places = re.findall(r'class="where" href="[^"]*">(\d+:\d+)</a>', html)
    assert places == [f"{r.sequence}:{r.position}" for r in kept.itertuples()]
    assert html.count('class="here"') == len(kept)
    assert len(test.get("plotly_chart")) == 2


def test_shades_of_an_example_follow_its_window(show: Show, runs: Path, made_run: Run) -> None:
    html = markup(show(runs, "neuron", run="made", neuron="L1/N3"))
    first = examples(made_run, 1, 3).iloc[0]
    line = html.split('class="tw-example"')[1]
    tips = re.findall(r'title="([^"]*)"', line)
    window = np.asarray(first["window"], dtype=float)
    low = max(0, 16 - int(first["position"]))
    assert tips[: len(tips)] == [number(v) for v in window[low : low + len(tips)] if v > 0][: len(tips)]
    assert number(float(first["value"])) in tips


def test_the_sample_goes_down_the_range_of_values(show: Show, runs: Path, made_run: Run) -> None:
    test = show(runs, "neuron", run="made", neuron="L1/N3")
    sample = examples(made_run, 1, 3).query("kind == 'sample'")["value"].sort_values(ascending=False)
    parts = [str(block.proto.body) for block in test.get("html") if "Random sample of firings" in str(block.proto.body)]
    assert re.findall(r'<span class="number">([^<]*)</span></div>', parts[0])[1:] == [number(v) for v in sample]


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


def test_a_tokens_neurons_are_those_with_examples_at_it(show: Show, runs: Path, made_run: Run) -> None:
    """Held against the examples of every neuron, one by one."""
    tokens = made_run.activity().set_index(["sequence", "position"])["token_id"]
    kept = made_run.frame("examples")
    token = int(tokens.loc[list(zip(kept["sequence"], kept["position"], strict=True))].mode().iloc[0])
    neurons = neurons_of(made_run, token).set_index("label")
    every = by_neuron(made_run).set_index("label")
    there = {}
    for (layer, neuron), part in kept.groupby(["layer", "neuron"]):
        here = np.array([tokens[place] == token for place in zip(part["sequence"], part["position"], strict=True)])
        if here.any():
            tops = part["kind"] == "top"
            counts = (int((tops & here).sum()), int(tops.sum()), int((~tops & here).sum()), int((~tops).sum()))
            there[f"L{layer}/N{neuron}"] = (*counts, float(part.loc[here, "value"].max()))
    names = ["top_here", "top_examples", "sample_here", "sample_examples", "value"]
    assert {row[0]: tuple(row[1:]) for row in neurons[names].itertuples()} == there
    assert len(there) > 1
    assert (neurons["density"] == every.loc[neurons.index, "density"]).all()
    shares = (neurons["top_here"] / neurons["top_examples"]).tolist()
    assert shares == sorted(shares, reverse=True)
    html = markup(show(runs, "token", run="made", token=str(token)))
    html = html.split("of its largest values<")[1].split("fires at<")[0]
    assert re.findall(r'class="name">(L\d+/N\d+)<', html) == neurons.index[:12].tolist()
    assert "neuron?run=made&amp;neuron=L" in html


def test_a_neuron_that_the_token_alone_fires_is_marked(show: Show, made: ModuleType, tmp_path: Path) -> None:
    """Two neurons of an example at a token, one of which the sums say answers to that token alone."""
    run = made.make(tmp_path / "run", layers=3, sequences=20, fired=True)
    tokens = run.activity().set_index(["sequence", "position"])["token_id"]
    first = run.frame("examples").iloc[0]
    token = int(tokens[(first["sequence"], first["position"])])
    assert not neurons_of(run, token)["one_token"].any()
    place = next((run.path / "summary").rglob("neurons.parquet"))
    sums = pd.read_parquet(place)
    it = (sums["layer"] == first["layer"]) & (sums["neuron"] == first["neuron"])
    sums.loc[it, ["token_min", "token_max"]] = token
    sums.to_parquet(place, index=False)
    forget_checksums(run)
    neurons = neurons_of(open_run(run.path), token)
    assert neurons.loc[neurons["one_token"], "label"].tolist() == [f"L{first['layer']}/N{first['neuron']}"]
    assert markup(show(tmp_path, "token", run="run", token=str(token))).count("fires on nothing else") == 1


def test_without_examples_a_tokens_page_says_what_it_leaves_out(show: Show, runs: Path) -> None:
    with pytest.raises(Missing, match="--examples"):
        neurons_of(open_run(runs / "summary"), 40)
    test = show(runs, "token", run="summary", token="40")
    assert not test.exception
    shown = markup(test)
    assert (
        "Left out, as this summary of a run does not keep what they need: neurons with an example at this token; in "
        "the text; neurons that this token fires." in shown
    )
    assert not test.info and "Neurons with an example" not in shown, "no box under a heading"
