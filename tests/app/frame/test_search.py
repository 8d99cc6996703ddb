"""The search in the bar: which page each kind of text leads to, and what is said where none is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

from twell.analysis.tokens.text_search import places_of
from twell.app.frame import search
from twell.app.frame.search import target
from twell.workbench.run.store import Run, open_run

Show = Callable[..., AppTest]


@pytest.mark.parametrize(
    ("text", "page", "parameters"),
    [
        ("l2 / n7", "neuron", {"neuron": "L2/N7"}),
        ("formaldehyde", "token", {"token": "40"}),
        ("␣Formaldehyde", "token", {"token": "40"}),
        ("3:12", "text", {"sequence": "3", "position": "12"}),
        ("ormaldehyd", "text", None),
        ('"formaldehyde"', "text", None),
        ("L9/N1", "", {}),
        ("999:0", "", {}),
        ("L999:0", "", {}),
        ("no such words", "", {}),
        ("<script>window.twellHurt=1</script>", "token", {"token": "50"}),
    ],
)
def test_what_is_sought(made_run: Run, text: str, page: str, parameters: dict[str, str] | None) -> None:
    result = target(made_run, text)
    assert result.page == page
    assert bool(result.reason) == (page == "")
    if parameters is None:
        words = text.strip('"')
        first = places_of(made_run, words).iloc[0]
        places = {"sequence": "sequence", "position": "position", "to": "last"}
        parameters = {**{name: str(first[column]) for name, column in places.items()}, "find": words}
    assert result.parameters == parameters


def test_of_several_tokens_of_a_name_the_most_frequent_is_taken(made_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"The": 1, "the": 3, "␣the": 2, "THE": 4}  # the most frequent first
    counted = pd.DataFrame({"text": [*names], "token_id": [*names.values()], "count": [9, 7, 5, 3]})
    monkeypatch.setattr(search, "fetch", lambda *given, **options: counted.iloc[::-1])
    called = {text: search.token_called(made_run, text) for text in ("the", "The", "tHe", "␣the", " the", "thee")}
    assert called == {"the": 3, "The": 1, "tHe": 1, "␣the": 2, " the": 2, "thee": None}


def test_a_run_without_rows_finds_tokens_and_says_that_it_keeps_no_text(runs: Path) -> None:
    run = open_run(runs / "summary")
    assert target(run, "formaldehyde").page == "token"
    assert target(run, "ormaldehyd").parameters == {"view": "tokens", "find": "ormaldehyd", "least": "1"}
    assert "keeps no text" in target(run, "no such words").reason


def test_the_field_leads_to_a_page_or_says_why_not(show: Show, runs: Path) -> None:
    test = show(runs, "layers", run="made")
    test.text_input(key="search").set_value("<b>nothing")
    test.button(key="search-now").click().run()
    assert "“&lt;b&gt;nothing”" in "".join(str(element.proto.body) for element in test.get("html"))
    test.text_input(key="search").set_value("formaldehyde")
    test.button(key="search-now").click().run()
    assert not test.exception
    assert test.query_params["token"] == "40"
    assert test.text_input(key="search").value == ""
