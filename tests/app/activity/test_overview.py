"""The Overview's figure, held against the answers it is drawn from, and what is said of the checks that were made."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from support.page_elements import markup

from twell.analysis import by_layer, by_word, position_blocks, speedup, surprisal_correlation
from twell.analysis.figures.overview import layer_by_layer
from twell.analysis.figures.speed.bench_beside import beside_capture
from twell.app.activity import highlights
from twell.app.ui.formatting import number, percent, times, whole
from twell.app.ui.widgets import LINKS, with_links
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run, open_run

Show = Callable[..., AppTest]


def named(figure: Any) -> list[str]:
    """What the panels are called, from the left."""
    return [note["text"] for note in figure.layout.annotations]


def test_a_row_a_layer_holds_what_the_answers_say(made_run: Run) -> None:
    blocks, layers, gains = position_blocks(made_run, blocks=16), by_layer(made_run), speedup(made_run)
    figure = layer_by_layer(blocks, layers, gains)
    heat, _lines, means, dead, gain, beside = figure.data
    table = blocks.pivot(index="layer", columns="position_from", values="mean")
    np.testing.assert_allclose(np.asarray(heat.customdata)[:, :, 0], table.to_numpy())
    assert list(heat.y) == list(range(made_run.layers))
    order = np.asarray(heat.z).ravel().argsort(kind="stable")
    assert (np.diff(table.to_numpy().ravel()[order]) >= 0).all(), "a stronger shade is a greater mean"
    np.testing.assert_allclose(means.x, layers["mean"].clip(lower=1))
    assert list(means.text) == [number(mean) for mean in layers["mean"]]
    assert list(dead.text) == [percent(share) for share in layers["dead_share"]]
    assert list(beside.text) == [times(gained) for gained in gains["speedup"]]
    assert min(beside.x) > max(gain.x), "no number lies over a bar or the line of dense"
    assert named(figure) == ["mean nnz by position", "nnz: mean, middle 80 %", "never fired", "FFN speedup"]


def test_counts_of_nothing_are_drawn_at_0(made_run: Run) -> None:
    layers = by_layer(made_run)
    layers.loc[0, ["p10", "p90", "mean"]] = 0
    figure = layer_by_layer(position_blocks(made_run, blocks=16), layers, speedup(made_run))
    _heat, lines, means = figure.data[:3]
    axis = figure.layout.xaxis2
    at = dict(zip(axis.tickvals, axis.ticktext, strict=True))
    assert at[means.x[0]] == at[lines.x[0]] == at[lines.x[1]] == "0"
    assert 10 ** axis.range[0] < means.x[0]


def test_every_cell_of_the_map_can_be_chosen_and_says_what_it_says(made_run: Run) -> None:
    figure = with_links(layer_by_layer, position_blocks(made_run, blocks=16), by_layer(made_run), speedup(made_run))
    heat, points = figure.data[0], figure.data[-1]
    assert points.name == LINKS
    for place, (row, column) in enumerate(np.ndindex(np.shape(heat.z))):
        assert (points.x[place], points.y[place]) == (heat.x[column], heat.y[row])
        assert np.array_equal(points.customdata[place], heat.customdata[row][column])
        assert points.hovertext[place] == heat.hovertext[row][column]


def test_a_capture_without_timings_quotes_the_bench(show: Show, made: ModuleType, tmp_path: Path) -> None:
    made.make(tmp_path / "benched", layers=4, sequences=20, bench=True, timings=0)
    made.make(tmp_path / "untimed", layers=4, sequences=20, timings=0)
    assert "<dt>FFN speedup</dt><dd><b>–</b><span>not timed</span>" in markup(show(tmp_path, run="untimed"))
    said, html = beside_capture(open_run(tmp_path / "benched")), markup(show(tmp_path, run="benched"))
    assert f"What skipping them saves was not timed in the capture; {said}" in html
    number = re.search(r"found (.*?), of (.*)\.", said)
    assert number and f"<dt>FFN speedup</dt><dd><b>{number[1]}</b><span>by twell bench, {number[2]}; not" in html
    (box,) = show(tmp_path, "kernels", run="benched").info
    assert "timed in the capture" in box.value, "what the bench timed stands above it"
    assert "Choose Measure now above" in box.value, "which costs no other capture"


def test_what_is_worth_a_look_has_a_picture_of_its_numbers(show: Show, runs: Path, made_run: Run) -> None:
    html = markup(show(runs, run="made"))
    pages = ["tokens", "layers", "neurons", "positions", "kernels"]
    assert re.findall(r'class="tw-mini" href="(\w+)\?run=made"', html) == pages
    bars = re.findall(r'title="L(\d+): ([^"]*)" style="height:(\d+)%"', html.split('href="layers?')[1].split("</a>")[0])
    means = by_layer(made_run)["mean"]
    assert [(int(layer), text, int(height)) for layer, text, height in bars] == [
        (layer, number(mean), round(100 * mean / means.max())) for layer, mean in enumerate(means)
    ]


def test_what_is_not_known_has_no_panel(show: Show, runs: Path) -> None:
    for run, panels in (("counts", {"never fired"}), ("oracle", {"FFN speedup"})):
        test = show(runs, run=run)
        assert not test.exception
        (chart,) = test.get("plotly_chart")
        notes = {note["text"] for note in json.loads(chart.proto.spec)["layout"]["annotations"]}
        assert not notes & panels
        assert len(notes) == 3


def test_the_picture_of_words_says_how_many_it_has(show: Show, made: ModuleType, tmp_path: Path) -> None:
    words = len(by_word(made.make(tmp_path / "small", layers=2, sequences=40), min_count=20))
    html = markup(show(tmp_path, run="small"))
    assert 6 <= words < 40 and f"neurons fired, each of {words} words" in html
    assert len(by_word(made.make(tmp_path / "large", layers=2, sequences=200), min_count=20)) > 40
    assert "neurons fired, 40 most active words" in markup(show(tmp_path, run="large"))


def test_the_words_of_a_model_of_one_layer_are_not_ranked_over_layers(
    show: Show, made: ModuleType, runs: Path, tmp_path: Path
) -> None:
    made.make(tmp_path / "one", layers=1, sequences=40)
    said = "In brackets: the mean over all places where the word occurs. Ranked by single token or by single place, oth"
    assert said in markup(show(tmp_path, run="one"))
    assert "the mean over all layers and all places" in markup(show(runs, run="made"))


def test_positions_at_which_nothing_fires_leave_the_other_shades_apart(made_run: Run) -> None:
    """A zero has no logarithm: it is as pale as the least of what fires, and does not stretch the scale."""
    blocks = position_blocks(made_run, blocks=16)
    shades = layer_by_layer(blocks, by_layer(made_run), None).data[0]
    least = blocks["mean"].idxmin()
    blocks.loc[least, "mean"] = 0.0
    with_zero = layer_by_layer(blocks, by_layer(made_run), None).data[0]
    assert with_zero.zmax == shades.zmax
    assert with_zero.zmin == pytest.approx(np.log10(blocks["mean"].nsmallest(2).max())), "of the second least"
    assert "0" in np.ravel(with_zero.text)
    blocks["mean"] = 0.0
    assert np.isfinite(layer_by_layer(blocks, by_layer(made_run), None).data[0].zmin)


@pytest.mark.parametrize("layers", [20, 40])
def test_a_deep_model_has_a_scale_in_place_of_numbers(made: ModuleType, tmp_path: Path, layers: int) -> None:
    run = made.make(tmp_path / "deep", layers=layers, sequences=12)
    figure = layer_by_layer(position_blocks(run, blocks=16), by_layer(run), None)
    assert figure.data[0].showscale
    assert figure.data[0].text is None
    assert figure.layout.height < 640, "in one screen, with the numbers above"


def test_what_was_verified_is_said_in_words(show: Show, made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "checked", layers=3, sequences=20)
    assert "Verified" not in markup(show(tmp_path, run="checked"))
    parity = {"same_choice": 0.9936, "tokens": 40960, "counts": 327680, "differing": 8, "beyond_rounding": 0}
    overhead = {"counts_over_none": 0.9983, "all_over_none": 1.0178, "device": "cuda"}
    manifests.update(run.path, parity=parity, overhead=overhead)
    assert open_run(run.path).manifest.parity == parity
    html = markup(show(tmp_path, run="checked")).replace("\u202f", " ")
    assert "the same next token for 99.36 % of 40 960 tokens; 8 of 327 680 counts differ, none by more than" in html
    assert "0.998 × with counts, 1.02 × with everything" in html


def test_a_correlation_that_may_be_none_is_of_neither_kind(
    show: Show, made: ModuleType, made_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = surprisal_correlation(made.make(tmp_path / "few", layers=3, sequences=6, seed=1))
    assert not (rows["low"] > 0).any() and not (rows["high"] < 0).any()
    html = markup(show(tmp_path, run="few"))
    assert "harder to predict cannot be told for sure in any layer: rank correlations from" in html
    assert "in 0 of" not in html
    monkeypatch.setattr(highlights, "fetch", lambda *_: rows.assign(low=[0.1, -0.1, -0.1]))
    said = "fires more neurons in 1 of 3 layers, fewer in 0, and neither for sure in 2: "
    assert said in highlights._surprisal(made_run)


def test_tokens_of_the_sentences_are_links_to_their_pages(show: Show, runs: Path, hostile: dict[int, str]) -> None:
    html = markup(show(runs, run="made"))
    words = by_word(open_run(runs / "made")).sort_values("mean", ascending=False, kind="stable")
    assert f'href="token?run=made&amp;{urlencode({"word": words["word"].iloc[0]})}"' in html
    assert not any(text in html for text in hostile.values() if "<" in text)


def test_neurons_that_cannot_be_read_are_not_said_to_be_unrecorded(
    show: Show, made: ModuleType, tmp_path: Path
) -> None:
    torn = made.make(tmp_path / "torn", layers=2, sequences=12).parts("neurons")[0]
    torn.write_bytes(torn.read_bytes()[:100])
    made.make(tmp_path / "counts", layers=2, sequences=12, neurons=False)
    assert "one of their files cannot be read" in markup(show(tmp_path, run="torn"))
    assert "not recorded: capture with --probes neurons" in markup(show(tmp_path, run="counts"))


def test_a_model_of_one_layer_is_not_compared_with_itself(show: Show, tmp_path: Path, made: ModuleType) -> None:
    """It fired the most and the fewest neurons in layer 0, in "each of its 1 layer" of "1 layers"."""
    made.make(tmp_path / "one", layers=1, sequences=40, bench=True)
    shown = markup(show(tmp_path, run="one"))
    layers = by_layer(open_run(tmp_path / "one"))
    assert "1 layer × 64" in shown and "In its only layer a token meets 512 neurons" in shown
    assert f"The only layer fires {number(layers['mean'].iloc[0])} neurons per token." in shown
    assert "never fired</a>." in shown
    for word in (
        "fires the fewest",
        "most in layer",
        "strongest in layer",
        "; layer by layer",
        "1 of 1",
        "all 1 layer",
        "summed over layers",
    ):
        assert word not in shown, word


def test_layers_that_fire_alike_still_have_an_axis_with_numbers(made_run: Run) -> None:
    """Of three layers around 130 neurons the axis named 100 alone, as it named numbers outside of it."""
    layers = by_layer(made_run).assign(p10=118.0, mean=130.0, p90=147.0)
    axis = layer_by_layer(position_blocks(made_run, blocks=16), layers, speedup(made_run)).layout.xaxis2
    inside = [tick for tick in axis.tickvals if axis.range[0] <= np.log10(tick) <= axis.range[1]]
    assert len(inside) == len(axis.tickvals) >= 2


def test_a_loss_over_generated_tokens_is_said_to_be_one(show: Show, made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "written", sequences=20, timings=0)
    note = ", those of generated tokens among them"
    assert note not in markup(show(tmp_path, "overview", run="written"))
    manifests.update(run.path, options=run.manifest.options | {"generate": 8})
    assert f"{whole(run.manifest.loss_tokens)} predictions{note}" in markup(show(tmp_path, "overview", run="written"))
