"""What lists, links and numbers of pages show."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote_plus

import numpy as np
import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest
from support.page_elements import layout, markup

from twell.analysis import by_neuron, by_token, by_word, findings, position_fit, token_classes
from twell.analysis.figures.speed.kernels import break_even
from twell.analysis.passage import passage
from twell.analysis.statistics import t_half
from twell.app.tokens.word_data import word_layers, word_neurons, word_tokens
from twell.app.ui.formatting import SPACE, number, whole
from twell.workbench.run.store import Run

Show = Callable[..., AppTest]


def test_the_fall_along_a_sequence_stands_there_with_its_verdict(show: Show, runs: Path, made_run: Run) -> None:
    test = show(runs, "positions", run="made")
    fits = position_fit(made_run)
    notes = [note["text"] for note in layout(test, "decay")["annotations"]]
    assert [note.split(" · ")[0] for note in notes] == fits["verdict"].tolist()


def test_break_even_is_where_the_line_crosses() -> None:
    nnz = pd.Series([10.0, 20.0, 40.0, 80.0])
    frame = pd.DataFrame({"nnz_mean": nnz, "dense_us": 100.0, "sparse_us": 20.0 + 0.5 * nnz})
    assert break_even(frame) == pytest.approx(160.0)
    assert break_even(frame.head(3)) is None
    assert break_even(frame.assign(sparse_us=300 - nnz)) is None
    assert break_even(frame.assign(sparse_us=200 + nnz)) is None


def test_kernels_offers_no_measurement_without_the_model(show: Show, runs: Path) -> None:
    shown = markup(show(runs, "kernels", run="made"))
    assert "not on this machine, and nothing is downloaded" in shown
    two = r"[+−]\d\.\d\d"
    assert re.search(rf"Pearson {two} \(p = \S+, .+; {two} to {two} with 95{SPACE}% .+\), Spearman {two}\.", shown)
    assert "puts the break-even at about" in shown


def test_rows_lead_to_tokens_and_words_and_show_where_they_stand(show: Show, runs: Path, made_run: Run) -> None:
    words = by_word(made_run, min_count=5).sort_values("mean", ascending=False, kind="stable")
    shown = markup(show(runs, "tokens", run="made", least="5"))
    linked = re.findall(r'class="tw-fired" href="token\?run=made&amp;word=([^&"]*)', shown)
    assert [unquote_plus(html.unescape(word)) for word in linked] == words["word"].head(len(linked)).tolist()
    assert shown.count('class="around"') > 0
    there = re.findall(r'class="tw-its" href="text\?run=made&amp;sequence=(\d+)&amp;position=(\d+)">its', shown)
    assert len(there) == len(linked), "the run keeps its firings"
    for word, (sequence, position) in zip(words["word"], there, strict=False):
        ids = passage(made_run, int(sequence))["token_id"].iloc[int(position) :].tolist()
        assert made_run.decode(ids).lstrip().startswith(word)
    fewest = markup(show(runs, "tokens", run="made", view="tokens", end="fewest"))
    tokens = by_token(made_run, min_count=20).sort_values("mean", kind="stable")
    linked = re.findall(r'class="tw-fired" href="token\?run=made&amp;token=(\d+)', fewest)
    means = tokens.set_index("token_id")["mean"]
    assert means[[int(token) for token in linked]].tolist() == tokens["mean"].head(len(linked)).tolist()
    word = words["word"].iloc[0]
    page = show(runs, "token", run="made", word=word)
    assert not page.exception
    places = re.findall(r'class="where">(\d+):(\d+)<', markup(page))
    assert places
    chip = 'class="plain tw-chip" href="text?run=made&amp;sequence={}&amp;position={}"'
    assert chip.format(*places[0]) in markup(page), "its neurons, above all figures"
    for sequence, position in places[:5]:
        text = made_run.decode(passage(made_run, int(sequence))["token_id"].iloc[int(position) :].tolist())
        assert text.lstrip().startswith(word) or word in text[:20]
    assert "No such word" in markup(show(runs, "token", run="made", word="<b>"))


def firings_of(run: Run, rows: pd.DataFrame) -> dict[str, tuple[float, int, int]]:
    """Mean value, places that fire it and places known, of each neuron that the tokens fire, one place at a time."""
    kept = {key: part for key, part in run.frame("fired").groupby(["sequence", "position"])}
    of_place: dict[str, dict[int, float]] = {}
    places: dict[int, set[int]] = {}  # by layer
    for token in rows.itertuples():
        for row in kept.get((token.sequence, token.position), pd.DataFrame()).itertuples():
            places.setdefault(row.layer, set()).add(token.place)
            for neuron, value in zip(row.neuron, row.value, strict=True):
                values = of_place.setdefault(f"L{row.layer}/N{neuron}", {})
                values[token.place] = max(values.get(token.place, 0.0), float(value))
    known = {label: len(places[int(label[1 : label.index("/")])]) for label in of_place}
    return {label: (sum(v.values()) / known[label], len(v), known[label]) for label, v in of_place.items()}


def test_a_word_shows_its_neurons_and_what_each_place_fires(show: Show, runs: Path, made_run: Run) -> None:
    """Held against the rows of the passages; a word of several tokens has those of all of them."""
    words = by_word(made_run, min_count=3)
    word = words.loc[words["pieces"].between(2, 6), "word"].iloc[0]
    rows = word_tokens(made_run, word)
    activity = made_run.activity().set_index(["sequence", "position"])
    for _, place in rows.groupby("place"):
        own = activity.loc[list(zip(place["sequence"], place["position"], strict=True)), "token_id"].tolist()
        text = made_run.decode(own)
        assert word in text and word not in made_run.decode(own[:-1]), "its tokens, and no more"
    counted = rows[rows["flags"] == 0]
    layers = word_layers(made_run, word)
    columns = [f"nnz_{layer:02}" for layer in range(made_run.layers)]
    np.testing.assert_allclose(layers["nnz"], counted[columns].mean())
    kept = made_run.frame("examples", ["layer", "neuron", "sequence", "position"])
    here = kept.merge(rows[["sequence", "position"]].drop_duplicates(), on=["sequence", "position"])
    neurons = word_neurons(made_run, word)
    assert set(zip(neurons["layer"], neurons["neuron"], strict=True)) == set(
        zip(here["layer"], here["neuron"], strict=True)
    )
    page = show(runs, "token", run="made", word=word)
    assert not page.exception
    shown = markup(page)
    assert "of its largest values<" in "".join(str(part.proto.body) for part in page.columns[0].get("html"))
    with_example, all_fired = shown.split("of its largest values<")[1].split("fires at<")
    assert re.findall(r'class="name">(L\d+/N\d+)<', with_example) == neurons["label"].head(12).tolist()
    fires = firings_of(made_run, rows)
    density = by_neuron(made_run).set_index("label")["density"]
    excess = {label: fired / known - density[label] for label, (_, fired, known) in fires.items()}
    expected = sorted(fires, key=lambda label: (-excess[label], -fires[label][0]))  # more often than elsewhere
    names = re.findall(r'class="name">(L\d+/N\d+)</span>.*?<span>(\d+) of (\d+)', all_fired)
    assert [float(number(fires[label][0])) for label, _, _ in names] == [
        float(number(fires[label][0])) for label in expected[: len(names)]
    ]
    assert all((int(fired), int(places)) == fires[label][1:] for label, fired, places in names) and len(names) > 8
    first = rows[rows["place"] == 0][columns].to_numpy().mean()
    assert f'<span class="number">{number(first)}</span></a>' in shown
    assert "Choose a place for its passage" in shown and len(page.get("plotly_chart")) == 1


def test_whole_words_and_classes_are_ranked_too(show: Show, runs: Path, made_run: Run) -> None:
    test = show(runs, "tokens", run="made", view="words", least="5")
    assert not test.exception
    assert len(test.dataframe[0].value) == len(by_word(made_run, min_count=5))
    assert len(test.get("plotly_chart")) == 1
    test = show(runs, "tokens", run="made", view="classes")
    assert not test.exception
    specification = str(test.get("plotly_chart")[0].proto.spec)
    for name in token_classes(made_run)["class"]:
        assert name in specification


@pytest.mark.parametrize("page", ["overview", "layers", "positions", "compare", "tokens"])
def test_a_run_of_one_sequence_has_lines_and_no_intervals(
    show: Show, made: ModuleType, tmp_path: Path, page: str
) -> None:
    made.make(tmp_path / "one", layers=2, sequences=1, length=400, parts=1, timings=0)
    made.make(tmp_path / "other", layers=2, sequences=20, timings=0)
    test = show(tmp_path, page, run="one", **{"with": "other"})
    assert not test.exception
    shown = markup(test)
    assert "– to –" not in shown and "{intervals}" not in shown
    assert not re.search("95.% interval(?!s where the runs tell one)", shown), (
        "of neurons that never fired it may be said"
    )
    assert ("without intervals, which take several documents" in shown) == (page != "overview")


@pytest.mark.parametrize("page", ["layers", "positions"])
def test_questions_of_many_documents_say_that_there_are_intervals(show: Show, runs: Path, page: str) -> None:
    shown = markup(show(runs, page, run="made"))
    assert re.search("by layer,? with 95.% intervals", shown)
    assert "{intervals}" not in shown and "without intervals" not in shown


def test_a_run_without_sums_of_neurons_says_nothing_of_dead_ones(show: Show, runs: Path) -> None:
    assert "dead neurons" in str(layout(show(runs, "layers", run="made"), "ridges")["annotations"])
    test = show(runs, "layers", run="counts")
    assert "dead" not in str(layout(test, "ridges")["annotations"])
    assert "Dead:" not in markup(test)


@pytest.mark.parametrize(
    ("page", "address"), [("tokens", {}), ("tokens", {"view": "words"}), ("neurons", {}), ("export", {})]
)
def test_numbers_of_tables_do_not_go_by_the_language_of_the_browser(
    show: Show, runs: Path, page: str, address: dict[str, str]
) -> None:
    tables = show(runs, page, run="made", **address).dataframe
    assert tables, "a page with a table"
    forms = [
        (name, told.get("type_config", {}).get("format"))
        for table in tables
        for name, told in json.loads(table.proto.columns or "{}").items()
    ]
    assert [(name, form) for name, form in forms if form and not form.startswith("%")] == []


@pytest.mark.parametrize(
    ("page", "address"),
    [("tokens", {"view": "tokens"}), ("tokens", {"view": "words"}), ("neurons", {}), ("export", {}), ("findings", {})],
)
def test_what_a_table_lacks_is_a_dash(show: Show, runs: Path, page: str, address: dict[str, str]) -> None:
    """Not the word None, which Streamlit writes."""
    assert {table.proto.placeholder for table in show(runs, page, run="made", **address).dataframe} == {"–"}


def test_the_overview_says_the_numbers_of_the_other_pages(show: Show, made: ModuleType, tmp_path: Path) -> None:
    def one_alone(columns: dict[str, Any]) -> dict[str, Any]:
        """Token 199 in a single sequence, which tells no standard error."""
        columns["token_id"][columns["token_id"] == 199] = 198
        columns["token_id"][np.flatnonzero(columns["sequence"] == 0)[5:30]] = 199
        return columns

    run = made.make(tmp_path / "one", layers=3, sequences=40, length=96, change=one_alone)
    every = by_token(run)
    assert every["z_se"].isna().sum() == 1
    words = whole(len(by_word(run, min_count=20)))
    worth = markup(show(tmp_path, run="one"))
    assert f"Of {words} words that occur at least 20 times, these fire the most" in worth
    assert f"{words} words that occur at least 20 times" in markup(show(tmp_path, "tokens", run="one"))
    assert f"{whole(len(every))} tokens that occur at least" in markup(
        show(tmp_path, "tokens", run="one", view="tokens")
    )
    claim = (
        findings(run).set_index("claim").loc["The first token of a sequence fires far more neurons than later ones."]
    )
    least, most = re.findall(r"ones, ([\d.]+) to ([\d.]+) times by layer", claim["this_run"])[0]
    shown = re.findall(rf"layer by layer ([\d.]+) to ([\d.]+){SPACE}×", worth)[0]
    assert [f"{float(ratio):.1f}" for ratio in shown] == [least, most]
    pooled = re.findall(r"position 0 fires ([\d.]+) times", claim["this_run"])[0]
    overall = re.findall(
        rf"sequence fires ([\d.]+){SPACE}× as many neurons as later positions, summed over layers", worth
    )
    assert [f"{float(ratio):.2f}" for ratio in overall] == [pooled], "one number on both pages"


def test_an_order_says_what_it_is_and_its_dots_stand_between_the_least_and_the_most(
    show: Show, runs: Path, made_run: Run
) -> None:
    shown = markup(show(runs, "tokens", run="made", view="tokens"))
    assert "Ordered by neurons fired a layer, the mean over layers and over all places of a token, of tokens" in shown
    assert f"neurons a layer ± 95{SPACE}%" in shown, "one meaning of ±, named in the column"
    tokens = by_token(made_run, min_count=20).sort_values("mean", ascending=False, kind="stable").head(30)
    half = t_half(tokens["effective"] - 1) * tokens["mean_se"]
    first = f"{number(tokens['mean'].iloc[0])} ± {number(half.iloc[0], 2)}"
    assert f"<span>{first}</span>" in shown
    places = [float(place) for place in re.findall(r'<b style="left:([\d.]+)%"', shown)]
    assert places == sorted(places, reverse=True) and 0 < places[-1] < 30 and 60 < places[0] < 100
