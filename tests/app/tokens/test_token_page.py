"""Which layer makes most of what a token fires, and where its neurons stand."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from urllib.parse import quote_plus

import pytest
from streamlit.testing.v1 import AppTest
from support import synthetic_runs
from support.page_elements import markup
from support.split_characters import bytes_of, split_run

from twell.analysis import by_layer, by_token, by_word, contexts, token_profile
from twell.analysis.figures.tokens import MIN_COUNT
from twell.analysis.tokens.token_text import spell
from twell.analysis.tokens.word_places import places_of_word
from twell.app.tokens.word_data import word_layers
from twell.app.ui.formatting import percent
from twell.workbench.run.store import Run, open_run

Show = Callable[..., AppTest]


def test_one_layer_that_makes_most_firings_is_named(
    show: Show, runs: Path, made_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = by_layer(made_run)["share"]
    sentence = f"there layer {share.idxmax()} decides, which has {percent(share.max())} of all firings"
    assert 0.3 < share.max() < 0.5
    above = f"Layer {share.idxmax()} makes {percent(share.max())} of all firings of this run, more than any other"
    shown = markup(show(runs, "tokens", run="made"))
    assert sentence in shown and shown.index(above) < shown.index("The words that fire most") < shown.index(sentence)
    assert not {"decides", "other,"} & set(markup(show(runs, "tokens", run="made", rank="z")).split())
    monkeypatch.setattr("twell.app.tokens.token_order.MOST", 0.3)
    assert f"Mostly layer {share.idxmax()}: it makes" in markup(show(runs, "tokens", run="made"))
    word = by_word(made_run, min_count=20)["word"].iloc[0]
    of_word = word_layers(made_run, word)["nnz"] / word_layers(made_run, word)["nnz"].sum()
    said = f"Mostly layer {of_word.idxmax()}: it makes {percent(of_word.max())} of what this word fires"
    assert "Mostly" not in markup(show(runs, "token", run="made", word=word)), "no layer makes half of them"
    monkeypatch.setattr("twell.app.tokens.token_rows.MOST", of_word.max() - 0.01)
    assert said in markup(show(runs, "token", run="made", word=word))
    profile = token_profile(made_run, 40).set_index("layer")["mean"]
    said = f"Mostly layer {profile.idxmax()}: it makes {percent(profile.max() / profile.sum())} of what this token"
    monkeypatch.setattr("twell.app.tokens.token_rows.MOST", 0)
    assert said in markup(show(runs, "token", run="made", token="40"))


def test_one_list_answers_which_fire_most_and_the_others_say_what_they_answer(
    show: Show, runs: Path, made_run: Run
) -> None:
    answer = "These rows answer the question: whole words by neurons fired a layer"
    shown = markup(show(runs, "tokens", run="made"))
    assert shown.count(answer) == 1 and shown.index(answer) < shown.index("The words that fire most")
    assert f"of words seen at least {MIN_COUNT} times" in shown and "where in the text most fire at once" in shown
    best = by_word(made_run, min_count=MIN_COUNT).sort_values("mean", ascending=False)["word"].iloc[0]
    assert re.findall(r'href="token\?[^"]*word=([^"&]*)', shown)[0] == quote_plus(best), "it is what it says"
    for address, other in (
        ({"rank": "z"}, "which stand out with every layer counting alike"),
        ({"view": "tokens"}, "which pieces of words fire most"),
        ({"view": "tokens", "rank": "z_position"}, "which stand out with every layer counting alike"),
    ):
        shown = markup(show(runs, "tokens", run="made", **address))
        assert answer not in shown and f"these rows answer another question, {other}" in shown
        assert "tokens?run=made&amp;view=words" in shown
        assert ("s that fire most" in shown) == ("rank" not in address) != ("s that lead by z" in shown)
    summary = markup(show(runs, "tokens", run="summary"))
    assert "These rows answer the question: tokens by neurons" in summary, "it keeps no text, so no word and no place"
    assert "single" not in summary.split("These rows")[1].split("</p>")[0]
    others = "Ranked by single token, by single place, or with every layer counting alike, others come first."
    assert others in markup(show(runs, run="made"))


def test_examples_stand_beside_the_layers_where_no_firing_is_kept(show: Show) -> None:
    """Half of the page would be empty. The recorded run keeps the firings of its first sequence alone."""
    recorded = Path(str(resources.files("twell.data"))) / "recorded"
    test = show(recorded, "token", run="h200-8x2048-text", word="four")
    assert not test.exception
    left, right = ("".join(str(part.proto.body) for part in one.get("html")) for one in test.columns[:2])
    assert "Over the layers" in left and "Neurons with an example" in right
    assert "Left out: neurons that this word fires" in markup(test)


def test_a_word_that_begins_with_no_letter_stands_after_one() -> None:
    """As in I've: its page said that no token of it is counted."""
    recorded = open_run(Path(str(resources.files("twell.data"))) / "recorded" / "h200-8x2048-text")
    words = by_word(recorded).set_index("word")["count"]
    places = places_of_word(recorded, "'ve", limit=1000)
    assert len(places) == words["'ve"] and set(places["token"]) == {"'ve"}
    for word in ("the", "four", "doesn"):
        assert len(places_of_word(recorded, word, limit=1000)) == words[word]


def test_places_that_are_not_counted_are_told_from_those_that_are(show: Show, runs: Path, made_run: Run) -> None:
    """Count 20 stood beside 21 places: one begins a sequence."""
    counted = by_word(made_run, min_count=1).set_index("word")["count"]
    places = {word: len(places_of_word(made_run, word)) for word in counted[counted < 10].index}
    word = next(word for word, number in places.items() if number == counted[word] + 1)
    shown = markup(show(runs, "token", run="made", word=word))
    assert f"{places[word]} places, 1 of them (dotted) is not in the count" in shown
    assert shown.count('class="token out"') == 1
    whole_word = next(word for word, number in places.items() if 1 < number == counted[word])
    shown = markup(show(runs, "token", run="made", word=whole_word))
    assert f"{places[whole_word]} places. Choose" in shown and "token out" not in shown


def test_the_table_of_words_has_columns_that_it_explains(show: Show, runs: Path) -> None:
    """`effective` and `degrees` stood in it with four decimals, and nothing said of what."""
    table = show(runs, "tokens", run="made").dataframe[-1].value
    assert list(table) == ["word", "count", "sequences", "documents", "pieces", "mean", "z", "z_se"]


def test_a_short_run_leads_from_no_words_to_every_word(show: Show, tmp_path: Path) -> None:
    """The page that all begin with was a dead end: it told of rows that it had not, and how to ask Python."""
    synthetic_runs.make(tmp_path / "short", sequences=1, length=40, parts=1)
    for view in ("words", "tokens"):
        test = show(tmp_path, "tokens", run="short", view=view)
        assert "occurs 20 times, the most frequent one" in test.info[0].value
        assert "These rows answer" not in markup(test) and "answer another question" not in markup(test)
        every = [link.proto for link in test.get("page_link") if "however rare" in link.proto.label]
        assert [link.label for link in every] == [f"Every {view[:-1]}, however rare →"]
        assert "least=1" in every[0].query_string and f"view={view}" in every[0].query_string
        assert f"The {view} that fire most" in markup(show(tmp_path, "tokens", run="short", view=view, least="1"))


def test_neurons_are_whole_numbers_in_the_list_of_the_highest(show: Show, tmp_path: Path) -> None:
    """91.0 neurons stood under 181."""
    synthetic_runs.make(tmp_path / "short", sequences=1, length=40, parts=1)
    numbers = re.findall(r'<span class="number">([^<]*)</span></a>', markup(show(tmp_path, "text", run="short")))
    assert len(numbers) == 12 and all(number.isdigit() for number in numbers) and min(map(int, numbers)) < 100


def test_a_z_that_rounds_to_nothing_has_no_sign(show: Show, runs: Path, made_run: Run) -> None:
    tokens = by_token(made_run, min_count=1)["token_id"]
    token = next(one for one in tokens if contexts(made_run, one)["z"].abs().min() < 0.004)
    shown = markup(show(runs, "token", run="made", token=str(token)))
    assert ">0.00<" in shown and ">+0.00<" not in shown and ">−0.00<" not in shown


def test_three_parts_of_characters_are_three_tokens_to_a_reader(show: Show, tmp_path: Path) -> None:
    run = split_run(tmp_path / "split")
    name = spell(bytes_of(40))
    assert f">{name}</bdi>" in markup(show(tmp_path, "token", run="split", token="40"))
    table = show(tmp_path, "tokens", run="split", view="tokens")
    listed = [spell(bytes_of(token)) for token in by_token(run, MIN_COUNT)["token_id"].head(3)]
    assert len(set(listed)) == 3 and all(f">{each}</bdi>" in markup(table) for each in listed)
    passage = markup(show(tmp_path, "text", run="split", sequence="1"))
    first = run.frame("activity").query("sequence == 1")["token_id"].iloc[0]
    assert f"{spell(bytes_of(first))}" in passage and "�" in passage, "by itself, and in the running text"
