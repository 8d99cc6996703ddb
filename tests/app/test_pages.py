"""What every page shows of a run, through Streamlit's own test runner; `test_lacking_runs` has others."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from support.copied_runs import copy_run
from support.page_elements import PAGES, drawn, figures, markup, notices

from twell.analysis import by_layer, by_neuron, by_token, by_word, contexts, overview
from twell.app.ui.formatting import number, percent, visible, whole
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run

COUNTS = (1, 0, 1, 5, 5, 2, 4, 1, 4, 0)  # figures of a whole run; on Findings that of the studies that ship
Show = Callable[..., AppTest]


@pytest.mark.parametrize(("page", "count"), list(zip(PAGES, COUNTS, strict=True)))
def test_every_page_draws_a_whole_run(show: Show, runs: Path, page: str, count: int) -> None:
    test = show(runs, page, run="made")
    assert not test.exception
    left_out = [warning.value for warning in test.warning]  # Compare names the run of the folder that is damaged
    assert [text.split()[0] for text in left_out] == ["torn"] * (page == "compare")
    assert not test.info
    assert figures(test) == count
    assert test.query_params["run"] == "made"


def test_headline_numbers_are_those_of_the_analysis(show: Show, runs: Path, made_run: Run) -> None:
    page_html = markup(show(runs, run="made"))
    layers = by_layer(made_run)
    tokens = int(layers["tokens"].iloc[0])
    mean = float(layers["mean"].mean())
    for value, words in (
        (percent(1 - mean / made_run.d_ff), "Sparsity"),
        (number(mean), f"{whole(tokens)} counted tokens"),
        (f"{number(made_run.manifest.loss)} nats", "Next-token loss"),
        (percent(float(layers["dead"].sum()) / (made_run.layers * made_run.d_ff)), "never fired in"),
    ):
        assert f"<b>{value}</b>" in page_html
        assert words in page_html
    limit = f"in less than {percent(3 / made_run.manifest.sequences)} of such sequences (95\u202f%), and on less than "
    limit += f"{number(3e6 / tokens, 2)} per million of tokens, were these independent"
    assert f"Each fires {limit}" in page_html
    dead = by_neuron(made_run).query("fires == 0")["label"].iloc[0]
    for page, address in (("layers", {}), ("neurons", {}), ("neuron", {"neuron": dead})):
        assert f"it fires {limit}" in markup(show(runs, page, run="made", **address)), "never of tokens alone"


def test_the_definition_of_nnz_is_on_every_page(show: Show, runs: Path) -> None:
    for page in PAGES:
        assert "gate pre-activation &gt; 0" in markup(show(runs, page, run="made"))


def test_tokens_are_filtered_by_the_address_and_by_hand(show: Show, runs: Path, made_run: Run) -> None:
    test = show(runs, "tokens", run="made", view="tokens", find="␣formal", least="5")
    assert list(test.dataframe[0].value["text"]) == ["␣formaldehyde"]
    test.text_input(key="find").set_value("").run()
    test.number_input(key="least").set_value(30).run()
    assert len(test.dataframe[0].value) == len(by_token(made_run, min_count=30))
    assert test.query_params["least"] == "30"
    assert "find" not in test.query_params
    test.text_input(key="find").set_value("no such token").run()
    assert "No token matches" in notices(test)


def links(test: AppTest) -> dict[str, str]:
    """The links of a page below the bar, with their parameters."""
    return {link.proto.label: link.proto.query_string for link in test.get("page_link")[10:]}


def test_a_text_of_a_few_words_leads_on_to_all_of_its_tokens(show: Show, made: ModuleType, tmp_path: Path) -> None:
    run = made.make(tmp_path / "words", layers=2, sequences=1, length=14, parts=1)
    test = show(tmp_path, "tokens", run="words", view="tokens", rank="z_position")
    assert "occurs 20 times" in notices(test)
    (query,) = [query for label, query in links(test).items() if label.startswith("Every token")]
    assert query == "run=words&view=tokens&rank=z_position&least=1"
    assert len(show(tmp_path, "tokens", run="words", view="tokens", least="1").dataframe[0].value) == len(
        by_token(run, min_count=1)
    )


def test_a_table_in_order_of_neurons_has_them_once_and_z_beside_them(show: Show, runs: Path, made_run: Run) -> None:
    rows = show(runs, "tokens", run="made", view="tokens", least="5").dataframe[0].value
    of = by_token(made_run, min_count=5).set_index("token_id").loc[rows["token_id"]]
    assert list(rows["mean"]) == sorted(of["mean"], reverse=True)
    np.testing.assert_allclose(rows["z"], of["z"])


def test_a_words_rank_is_its_place_in_the_list_of_words(show: Show, runs: Path, made_run: Run) -> None:
    words = by_word(made_run, min_count=20).sort_values("mean", ascending=False, ignore_index=True)
    text = markup(show(runs, "token", run="made", word=words["word"][2]))
    assert f"<dt>Rank</dt><dd><b>3</b><span>by nnz, of {len(words)} words with 20 places or more" in text
    rare = by_word(made_run, min_count=1).query("count == 1")["word"].iloc[0]
    assert "places or more" not in markup(show(runs, "token", run="made", word=rare))


def test_what_a_summary_only_run_lacks_is_neither_a_dead_end_nor_in_its_code(show: Show, runs: Path) -> None:
    to = links(show(runs, "text", run="summary"))
    assert to["How many neurons each token of the vocabulary fires →"] == "run=summary"
    assert to["made, a run of a model of the same shape, keeps its text →"] == "run=made"
    codes = {run: "".join(code.value for code in show(runs, "export", run=run).code) for run in ("made", "summary")}
    assert "run.activity(" in codes["made"] and "activity" not in codes["summary"]


def test_a_run_without_text_leads_to_the_longest_that_has_one(
    show: Show, made: ModuleType, runs: Path, tmp_path: Path
) -> None:
    copy_run(runs / "summary", tmp_path / "summary")
    for name, sequences in (("a", 4), ("long", 20), ("z", 4)):
        made.make(tmp_path / name, layers=2, sequences=sequences)
    assert links(show(tmp_path, "text", run="summary"))["long, a run of another model, keeps its text →"] == "run=long"


def test_a_token_shows_its_places_and_numbers(show: Show, runs: Path, made_run: Run) -> None:
    test = show(runs, "token", run="made", token="40")
    assert not test.exception
    assert figures(test) == 1
    page_html = markup(test)
    places = contexts(made_run, 40)
    assert page_html.count('class="tw-place"') == len(places)
    first = places.iloc[0]
    assert (
        f'sequence={first["sequence"]}&amp;position={first["position"]}">{first["sequence"]}:{first["position"]}</a>'
        in page_html
    )
    assert f">{whole(first['nnz'])}</span>" in page_html
    quiet = markup(show(runs, "token", run="made", token="40", order="quietest"))
    last = contexts(made_run, 40, order="quietest").iloc[0]
    assert re.findall(r'class="where" href="[^"]*">(\d+:\d+)<', quiet)[0] == f"{last['sequence']}:{last['position']}"


def test_a_token_that_is_not_there_is_said(show: Show, runs: Path) -> None:
    for token in ("99999", "-1", "abc", "１２"):
        assert "No such token" in markup(show(runs, "token", run="made", token=token))


def test_the_places_of_a_token_have_their_heading_before_they_are_found(
    show: Show, runs: Path, made_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unfound(run: Run, **arguments: Any) -> None:
        raise UserError("a damaged part")

    monkeypatch.setattr("twell.analysis.contexts", unfound)
    test = show(runs, "token", run="made", token="41")
    row = by_token(made_run, min_count=1).set_index("token_id").loc[41]
    assert f"{min(50, row['count'])} of {row['count']} occurrences" in markup(test)
    assert "a damaged part" in test.warning[0].value


@pytest.mark.parametrize("token", range(50, 57))
def test_token_text_is_text(show: Show, runs: Path, hostile: dict[int, str], token: int) -> None:
    """Nothing of a token reaches the page's HTML unescaped, nor any place that reads Markdown."""
    test = show(runs, "token", run="made", token=str(token))
    assert not test.exception
    page_html = markup(test)
    assert html.escape(visible(hostile[token])) in page_html
    assert not re.search(r"<(script|img|/div><b)", page_html)
    for element in (*test.markdown, *test.caption, *test.title, *test.header, *test.subheader):
        assert hostile[token].strip() not in element.value


def test_hostile_tokens_are_escaped_in_figures(show: Show, runs: Path, hostile: dict[int, str]) -> None:
    test = show(runs, "tokens", run="made", view="tokens", find="script", least="1")
    assert set(test.dataframe[0].value["text"]) == {visible(hostile[50]), visible(hostile[51])}
    specification = drawn(test, 0)
    assert "&lt;script&gt;" in specification
    assert "<script>" not in specification


def test_used_products_stand_under_nnz(show: Show, made: ModuleType, tmp_path: Path) -> None:
    """Where a ReLU on the up branch leaves some of the fired neurons without a product."""
    both = made.make(tmp_path / "both", layers=3, sequences=20, up_relu=True)
    used = overview(both)["used_mean"]
    assert f"{number(used)} of these, " in markup(show(tmp_path, run="both"))
    made.make(tmp_path / "one", layers=3, sequences=20)
    assert "of these, " not in markup(show(tmp_path, run="one"))
