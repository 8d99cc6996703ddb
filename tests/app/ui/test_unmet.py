"""An address that asks for what is not there: the page says so, and what it shows in its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from support.page_elements import markup

from twell.analysis import passage
from twell.workbench.run.store import Run

Show = Callable[..., AppTest]
SAYS = "The address asks for"


def test_a_sequence_past_the_end_is_said_until_another_is_chosen(show: Show, runs: Path, made_run: Run) -> None:
    last = made_run.manifest.sequences - 1
    test = show(runs, "text", run="made", sequence="9999")
    assert f"{SAYS} sequence 9999; there are {last + 1}, 0 to {last}: {last} is shown." in markup(test)
    assert test.number_input(key="sequence").value == last
    test.number_input(key="sequence").set_value(3).run()
    assert SAYS not in markup(test)


def test_a_position_past_the_end_is_said(show: Show, runs: Path, made_run: Run) -> None:
    tokens = len(passage.passage(made_run, sequence=7))
    there_is = f"the passage has {tokens} tokens"
    said = markup(show(runs, "text", run="made", sequence="7", position=str(tokens)))
    assert f"{SAYS} position {tokens}; {there_is}, 0 to {tokens - 1}: none is marked." in said
    said = markup(show(runs, "text", run="made", sequence="7", **{"from": "9999"}))
    assert f"{SAYS} from 9999; {there_is}: {tokens - 1} is shown." in said


@pytest.mark.parametrize("page", ["kernels", "neurons"])
def test_a_layer_that_the_model_has_not_is_said(show: Show, runs: Path, page: str) -> None:
    said = markup(show(runs, page, run="made", layer="L99"))
    assert f"{SAYS} layer L99; here is no such choice: all layers is shown." in said
    assert SAYS not in markup(show(runs, page, run="made", layer="L1"))


def test_what_is_long_or_a_tag_is_said_safely(show: Show, runs: Path) -> None:
    said = markup(show(runs, "text", run="made", sequence="<b>" + 50 * "9"))
    assert f"{SAYS} sequence &lt;b&gt;{17 * '9'}…; there" in said


def test_the_least_count_of_a_token_is_said_where_it_is_cut(show: Show, runs: Path) -> None:
    test = show(runs, "tokens", run="made", least="999999999")
    assert (
        f"{SAYS} least 999999999; here is no such choice: {test.number_input(key='least').value} is shown."
        in markup(test)
    )
