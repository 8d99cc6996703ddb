"""The Text page: the passage token by token, and its shades."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest
from support.page_elements import markup, shades

from twell.analysis.neurons.at_token import beside, first_of_layers, neurons_at, ordered
from twell.analysis.neurons.values import in_sequence
from twell.analysis.passage import Scale, loudest, passage, scale
from twell.analysis.tokens.highest import SEEN
from twell.analysis.tokens.text_around import pieces
from twell.analysis.tokens.text_search import beginnings, places_of
from twell.app.text.passage_view import in_unit, percentile_in_words
from twell.app.text.search_view import FOUND, passage_name
from twell.app.text.token_view import SHOWN
from twell.app.ui.formatting import whole
from twell.workbench.run.store import Run, open_run

Show = Callable[..., AppTest]


@pytest.mark.parametrize(
    ("percentile", "said"), [(0.2, "0"), (96.7, "97"), (99.31, "99.3"), (99.996, "99.9"), (100.0, "100")]
)
def test_only_the_largest_is_at_percentile_100(percentile: float, said: str) -> None:
    assert percentile_in_words(percentile) == said


@pytest.mark.parametrize(
    ("unit", "value", "said"), [("neurons", 12.0, "12"), ("nats", 1.2345, "1.23"), ("", 0.5, "0.500")]
)
def test_neurons_are_whole_and_other_values_have_three_digits(unit: str, value: float, said: str) -> None:
    assert in_unit(value, Scale("what", unit, 0, 1)) == said


def test_every_token_of_the_sequence_stands_there_in_order(show: Show, runs: Path, made_run: Run) -> None:
    body = markup(show(runs, "text", run="made", sequence="3"))
    rows = passage(made_run, 3)
    positions = [int(place) for place in re.findall(r'class="t[ "][^>]*position=(\d+)"', body)]
    assert positions == rows["position"].tolist()
    unnamed = markup(show(runs, "text", run="oracle", sequence="3"))  # a run that keeps no firings
    ids = [int(token) for token in re.findall(r'class="t[^>]*token=(\d+)"', unnamed)]
    assert ids == passage(open_run(runs / "oracle"), 3)["token_id"].tolist()
    assert "Sequence 3" in body
    assert "1st to 99th percentile of the run" in body


@pytest.mark.parametrize("shade", ["all", "L2", "surprisal"])
def test_the_stronger_shade_is_the_greater_value(show: Show, runs: Path, made_run: Run, shade: str) -> None:
    test = show(runs, "text", run="made", sequence="1", shade=shade)
    assert not test.exception
    rows = passage(made_run, 1)
    values = rows[{"all": "nnz", "L2": "nnz_02", "surprisal": "surprisal"}[shade]].to_numpy(float)
    drawn = np.array(shades(markup(test)))
    assert np.isnan(drawn).tolist() == np.isnan(values).tolist()
    known = ~np.isnan(values)
    ends = scale(made_run, shade)
    inside = known & (values > ends.low) & (values < ends.high)
    assert np.all(np.diff(drawn[inside][np.argsort(values[inside], kind="stable")]) >= 0)
    assert drawn[known].max() - drawn[known].min() > 0.3


@pytest.mark.parametrize("length", [2, 9])
def test_the_scale_of_surprisal_is_of_the_tokens_that_are_shaded(made: ModuleType, tmp_path: Path, length: int) -> None:
    """That of a second token is the loss at the first, which is flagged: in texts of two tokens there is no other."""
    run = made.make(tmp_path / "run", layers=2, sequences=30, length=length, parts=1)
    rows = pd.concat([passage(run, sequence) for sequence in range(30)])
    ends = scale(run, "surprisal")
    known = rows["surprisal"].dropna()
    assert (ends.low, ends.high) == pytest.approx(tuple(known.quantile([0.01, 0.99])))


def test_the_loudest_places_are_those_of_the_rows(made_run: Run) -> None:
    rows = made_run.activity(flagged=False)
    total = rows.filter(like="nnz_").sum(axis=1)
    ranked = loudest(made_run, "all")
    assert ranked["value"].iloc[0] == total.max()
    best = total.groupby(rows["token_id"]).max().sort_values(ascending=False)
    assert ranked["value"].tolist() == best.head(len(ranked)).tolist()
    assert ranked["token_id"].is_unique
    first = loudest(made_run, "surprisal").iloc[0]
    place = passage(made_run, int(first["sequence"])).iloc[int(first["position"])]
    assert place["surprisal"] == first["value"]
    every = made_run.activity()
    last = every.groupby("sequence")["position"].transform("max")
    assert first["value"] == every.loc[every["position"] < last, "loss"].max()


def test_the_loudest_places_are_of_different_tokens_though_one_fills_the_top(made: ModuleType, tmp_path: Path) -> None:
    def fill(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        total = sum(columns[name].astype(int) for name in columns if name.startswith("nnz_"))
        columns["token_id"][np.argsort(total)[-1000:]] = 7
        return columns

    run = made.make(tmp_path / "run", layers=2, sequences=120, parts=1, change=fill)
    rows = run.activity(flagged=False)
    assert len(rows) > 1500
    best = rows.filter(like="nnz_").sum(axis=1).groupby(rows["token_id"]).max().sort_values(ascending=False)
    ranked = loudest(run, "all")
    assert ranked["token_id"].iloc[0] == 7
    assert ranked["value"].tolist() == best.head(SEEN).tolist()


def test_characters_of_several_tokens_stand_once_whole() -> None:
    assert pieces([b"a", b"\xc3", b"\xa9", b"\n", b"\xff", None]) == ["a", "", "é", "\n", "�", ""]


def test_nothing_of_a_token_is_interpreted(show: Show, runs: Path, made_run: Run, hostile: dict[int, str]) -> None:
    rows = made_run.activity()
    for token in (50, 52, 54):
        sequence = int(rows.loc[rows["token_id"] == token, "sequence"].iloc[0])
        body = markup(show(runs, "text", run="made", sequence=str(sequence)))
        assert html.escape(hostile[token]) in body
        assert not re.search(r"<(script|img)|</div><b", body)


def test_before_a_choice_the_token_that_fires_most_stands_there(show: Show, runs: Path, made_run: Run) -> None:
    rows = passage(made_run, 3)
    most = rows[rows["flags"] == 0]["nnz"].idxmax()
    body = markup(show(runs, "text", run="made", sequence="3"))
    assert f"at position {most} fires {whole(rows['nnz'][most])} neurons, the most here" in body
    assert f'tw-chip" href="text?run=made&amp;sequence=3&amp;position={most}">which ones' in body
    pane = body.split('class="tw-pane">')[1].split("</pre>")[0]
    assert pane.startswith("Choose a token for its neurons.") and f"\nposition {most}\n" in pane
    marked = markup(show(runs, "text", run="made", sequence="3", position="5"))
    assert "the most here" not in marked and marked.split('class="tw-pane">')[1].split("\n")[1] == "position 5"
    assert "Choose a token for its page." in markup(show(runs, "text", run="oracle", sequence="3"))


def test_the_address_names_sequence_place_and_shade(show: Show, runs: Path) -> None:
    test = show(runs, "text", run="made", sequence="7", position="20", shade="L1")
    assert markup(test).count('class="t here') == 1
    assert test.number_input(key="sequence").value == 7
    test.number_input(key="sequence").set_value(8).run()
    assert test.query_params["sequence"] == "8"
    assert "position" not in test.query_params
    for nonsense in ("99999", "-4", "x", "<b>"):
        test = show(runs, "text", run="made", sequence=nonsense, shade=nonsense, position=nonsense)
        assert not test.exception
        assert "tw-passage" in markup(test)


def test_a_neuron_that_is_none_is_said_and_stays_to_be_mended(show: Show, runs: Path) -> None:
    for wrong in ("foo", "L9/N5", "L0/N512"):
        test = show(runs, "text", run="made", neuron=wrong)
        assert "No such neuron: the names of this run go from L0/N0 to L4/N511." in markup(test)
        assert test.text_input(key="neuron").value == wrong
    test.text_input(key="neuron").set_value("1 3").run()
    assert "No such neuron" not in markup(test)
    assert "value of L1/N3" in markup(test)


def test_a_passage_without_a_value_of_its_neuron_says_so(show: Show, runs: Path, made_run: Run) -> None:
    without = []
    for sequence in range(12):
        body = markup(show(runs, "text", run="made", neuron="L1/N3", sequence=str(sequence)))
        without.append("keeps no value of L1/N3 at these tokens" in body)
        assert without[-1] != any(shade > 0 for shade in shades(body))
    assert set(without) == {False, True}


def test_without_rows_of_tokens_the_page_says_so(show: Show, runs: Path) -> None:
    test = show(runs, "text", run="summary")
    assert not test.exception
    assert not test.info  # the line above every page of such a run says it, once
    assert markup(test).count("summary only") == 1
    assert "no rows of single tokens" in markup(test)


def test_one_neuron_shades_the_tokens_where_it_is_known_to_fire(show: Show, runs: Path, made_run: Run) -> None:
    test = show(runs, "text", run="made", sequence="4", neuron="1-5")
    assert "value of L1/N5" not in markup(test)  # not how a neuron is written
    test = show(runs, "text", run="made", sequence="4", neuron="L1/N5")
    assert not test.exception
    values = in_sequence(made_run, 1, 5, 4)
    rows = passage(made_run, 4)
    fires = set(values.index[values > 0])
    drawn = np.array(shades(markup(test)))
    assert set(np.flatnonzero(~np.isnan(drawn))) == {place for place, at in enumerate(rows["position"]) if at in fires}
    assert "value of L1/N5" in markup(test)
    assert "neuron=L1%2FN5" in markup(test)  # the loudest places keep it
    assert "not kept here" in markup(test)


def assert_shaded_by_each(body: str, run: Run, sequence: int) -> None:
    """Each neuron that is listed has rules that shade just the tokens that fire it."""
    listed = re.findall(r'data-n="(\d+)" href="neuron\?[^"]*neuron=L(\d+)%2FN(\d+)"', body)
    assert listed
    for index, layer, neuron in listed:
        values = in_sequence(run, int(layer), int(neuron), sequence)
        kept = run.rows("fired", [("layer", "=", int(layer)), ("sequence", "=", sequence)], ["position"])
        fires = {place for place in kept["position"].to_pylist() if values[place] > 0}
        rules = re.findall(rf'data-n="{index}"\]:is\(:hover,:focus-visible\)\) \.tw-passage>a:is\(([^{{]*)\)', body)
        assert {int(place) - 1 for rule in rules for place in re.findall(r"nth-child\((\d+)", rule)} == fires


def test_words_lead_to_the_passages_that_hold_them(show: Show, runs: Path, made_run: Run) -> None:
    rows = passage(made_run, 5)
    words = made_run.decode(rows["token_id"].iloc[20:24].tolist())
    test = show(runs, "text", run="made", find=words)
    assert not test.exception
    assert 'href="text?run=made&amp;sequence=5&amp;position=20&amp;to=23&amp;find=' in markup(test)
    assert "No passage contains" in markup(show(runs, "text", run="made", find="no such words"))
    begins = beginnings(made_run).set_index("sequence")["text"]
    assert made_run.decode(rows["token_id"].iloc[:4].tolist()).strip() in begins[5]
    assert passage_name(begins[5])[:20] in html.unescape(markup(show(runs, "text", run="made", sequence="5")))


def test_all_places_of_words_are_counted_and_each_token_of_one_is_marked(
    show: Show, runs: Path, made_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = places_of(made_run, "formaldehyde", limit=10_000)
    assert len(places) > FOUND
    said = f"The first {FOUND} of {whole(len(places))} places with these words"
    body = markup(show(runs, "text", run="made", find="formaldehyde"))
    assert said in body and body.count('<mark class="token">') == FOUND
    monkeypatch.setattr("twell.app.text.search_view.SOUGHT", len(places))
    more = said.replace(" places", " or more places")
    assert more in markup(show(runs, "text", run="made", find="formaldehyde")), "the search stops at some number"
    body = markup(show(runs, "text", run="made", sequence="5", position="20", to="23"))
    assert re.findall(r'class="t here[^>]*position=(\d+)"', body) == ["20", "21", "22", "23"]
    pane = body.split('class="tw-pane">')[1]
    assert "\nposition 20\n" in pane, "of the first"


def test_a_marked_token_names_the_neurons_that_it_fires(show: Show, runs: Path, made_run: Run) -> None:
    rows = made_run.frame("fired", ["sequence", "position"]).drop_duplicates()
    kept = rows[rows["sequence"] == 4]["position"]
    fired = beside(neurons_at(made_run, 4, int(kept.iloc[0])), made_run)
    test = show(runs, "text", run="made", sequence="4", position=str(kept.iloc[0]))
    assert not test.exception
    named = re.findall(
        r'<a class="tw-neuron" data-n="\d+" href="neuron\?run=made&amp;neuron=(L\d+)%2FN\d+', markup(test)
    )
    assert named == first_of_layers(ordered(fired, "layer"), 8)["layer"].map("L{}".format).tolist()
    assert_shaded_by_each(markup(test), made_run, 4)
    test.segmented_control(key="order").set_value("value").run()
    expected = ordered(fired, "value")
    named = re.findall(r'data-n="\d+" href="neuron\?run=made&amp;neuron=(L\d+%2FN\d+)"', markup(test))
    assert [name.replace("%2F", "/") for name in named] == expected["label"].head(SHOWN).tolist()
    test.selectbox(key="layer").select("L2").run()
    assert set(re.findall(r'class="name">(L\d+)/', markup(test))) == {"L2"}
    lost = next(place for place in range(96) if place not in set(kept))
    test = show(runs, "text", run="made", sequence="4", position=str(lost))
    assert f"keeps no firings of the token at {lost}" in test.info[0].value.replace("\\", "")


def test_one_phase_of_generation_alone(show: Show, made: ModuleType, runs: Path, tmp_path: Path) -> None:
    def generated(columns: dict[str, Any]) -> dict[str, Any]:
        loss = np.ma.where(columns["position"] == 19, np.float16(90), columns["loss"])
        return columns | {"phase": (columns["position"] >= 20).astype(np.uint8), "loss": loss}

    run = made.make(tmp_path / "made", layers=3, sequences=20, change=generated)
    test = show(tmp_path, "text", run="made", sequence="1", phase="decode")
    assert not test.exception
    drawn = np.array(shades(markup(test)))
    assert np.isnan(drawn[:20]).all()
    assert not np.isnan(drawn[20:]).any()
    assert (loudest(run, "all", "decode")["position"] >= 20).all()
    assert (loudest(run, "all", "prefill")["position"] < 20).all()
    first = loudest(run, "surprisal", "decode")
    assert (first["position"] == 20).any() and (first["position"] >= 20).all(), "the first generated token is one"
    assert (loudest(run, "surprisal", "prefill")["position"] < 20).all(), "and no token of the prompt"
    plain = show(tmp_path, "text", run="made", sequence="1")
    assert not np.isnan(shades(markup(plain))).any()
    assert "those in italics were generated" in markup(plain)
    assert "italics" not in markup(show(runs, "text", run="made", sequence="1")), "nothing was generated there"
