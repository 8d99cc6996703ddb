"""A whole word's part of page Token: its numbers, the tokens that it is cut into, and where in the text it stands."""

from __future__ import annotations

import html
from contextlib import suppress

import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.figures.tokens import MIN_COUNT, word_by_layer
from twell.analysis.memo import memo_scope
from twell.analysis.statistics import t_half
from twell.analysis.tokens.word_places import around_word, places_of_word
from twell.app.tokens.fired_data import fired_by_word
from twell.app.tokens.fired_view import can_tell, draw_fired
from twell.app.tokens.token_data import ALL_TOKENS
from twell.app.tokens.token_rows import draw_its_neurons, draw_neurons, say_mostly_layer, titled_row
from twell.app.tokens.word_data import with_nnz, word_layers, word_neurons, word_tokens
from twell.app.ui import widgets
from twell.app.ui.formatting import fixed, layer_width, number, plural, running, token_html, visible, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.questions import noted, say_left_out
from twell.app.ui.url_state import link
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

PLACES = 50  # shown at most
LONGEST = 100  # characters of a word in the address


def draw_word(run: Run, word: str) -> None:
    """Draw the page of a word that the run counts, or say that it counts no such word."""
    try:
        frame = fetch(run, words_of)
    except Missing:
        widgets.title("No words in this run")
        raise
    row = titled_row(frame, "word", word[:LONGEST], "word")
    if row is None:
        return
    half = t_half(row["degrees"]) * row["z_se"]
    error = "" if pd.isna(half) else f" ± {half:.2f}"
    widgets.numbers(
        (
            (
                "nnz per layer",
                number(row["mean"]),
                f"of {layer_width(run)} neurons, mean of its tokens",
            ),
            ("z", f"{fixed(row['z'])}{error}", "mean over layers; ± its 95 % interval"),
            ("Count", whole(row["count"]), f"in {plural(row['sequences'], 'sequence')}"),
            ("Rank", *rank_of(frame, row)),
            ("Tokens a word", f"{row['pieces']:.1f}", "how many it is cut into"),
        )
    )
    lacking: dict[str, list[str]] = {}
    about = "its tokens, its neurons, and where it stands in the text"
    with widgets.show_errors(), noted(about, lacking), memo_scope():  # the text is searched once
        run.files("activity")  # raises Missing, with the reason
        with suppress(Missing), widgets.scanning(run):  # where no token of it is counted
            say_mostly_layer(run, "word", fetch(run, word_layers, word=word).set_index("layer")["nnz"])
        draw_tokens(run, word)
        left, right = widgets.pair("pair")
        with left, widgets.show_errors():
            draw_layers(run, word, int(row["count"]))
        beside = left if can_tell(run, fired_by_word, word=word) else right
        with beside, widgets.show_errors(), noted("neurons with an example at this word", lacking):
            draw_neurons(run, "word", word_neurons, word=word)
        draw_places(run, word)
        with right, widgets.show_errors(), noted("neurons that this word fires", lacking):  # last: the model may read
            draw_fired(run, "word", fired_by_word, word_tokens, word=word)
    say_left_out(run, lacking)


def draw_layers(run: Run, word: str, count: int) -> None:
    """Draw the mean nnz in each layer of a word that is counted `count` times, beside the run's."""
    result = query(run, word_layers, word=word)
    first = result.frame.iloc[0]
    tokens, places = plural(int(first["tokens"]), "token"), plural(int(first["places"]), "place")
    at = f"its first {places}" if first["places"] < count else places
    caption = (
        f"Mean nnz of {tokens} of this word, at {at} (filled), and of all tokens of the run (open); axis logarithmic."
    )
    widgets.heading("Over the layers", caption, result)
    widgets.draw(word_by_layer(result.frame), "word-layers", "The word's mean nnz by layer, beside the run's")


def rank_of(frame: pd.DataFrame, row: pd.Series) -> tuple[str, str]:
    """Return a word's rank by nnz, and among how many: those that page Tokens lists if the word occurs as often.

    frame: the rows of all words; row: that of the word
    """
    often = row["count"] >= MIN_COUNT
    among = frame[frame["count"] >= MIN_COUNT] if often else frame
    rank = whole(int((among["mean"] > row["mean"]).sum()) + 1)
    return rank, f"by nnz, of {plural(len(among), 'word')}{f' with {MIN_COUNT} places or more' if often else ''}"


def words_of(run: Run) -> pd.DataFrame:
    """Return `analysis.by_word` of every word that the run's summary keeps, however rare."""
    for fewest in (1, 2, 5, 10, 20, 50, 100, 1000):
        try:
            return analysis.by_word(run, min_count=fewest)
        except Missing:
            continue
    return analysis.by_word(run)


def draw_places(run: Run, word: str) -> None:
    """Draw a link to each of the word's places, with the nnz there."""
    result = query(run, places_of_word, word=word, limit=PLACES).then(with_nnz, run, word)
    with widgets.scanning(run):
        frame = result.frame
    if frame.empty:
        return
    widgets.heading(
        "In the text",
        f"{say_places(frame)}. Choose a place for its passage and the neurons it fires there.",
        result,
    )
    around = [around_word(word, *text) for text in zip(frame["before"], frame["token"], frame["after"], strict=True)]
    titles = {"where": "sequence:position", "before": "", "token": "", "after": "", "number": "nnz a layer"}
    names = "".join(f'<span class="{kind}">{title}</span>' for kind, title in titles.items())
    lines = [
        f'<a class="tw-jump" href="{link("text", sequence=row.sequence, position=row.position)}">'
        f'<span class="where">{row.sequence}:{row.position}</span>'
        f'<span class="before"><span>{html.escape(running(before[-60:]))}</span></span>'
        f'<mark class="token{"" if row.counted else " out"}">{html.escape(visible(token))}</mark>'
        f'<span class="after">{html.escape(running(after[:60]))}</span>'
        f'<span class="number">{number(row.nnz)}</span></a>'
        for row, (before, token, after) in zip(frame.itertuples(), around, strict=True)
    ]
    st.html(f'<div class="tw-places"><div class="tw-jump names">{names}</div>{"".join(lines)}</div>')


def say_places(frame: pd.DataFrame) -> str:
    """Return how many places there are, and how many of them no statistic counts. frame: as `with_nnz` returns it"""
    places = f"The first {PLACES} places" if len(frame) == PLACES else plural(len(frame), "place")
    if frame["counted"].all():
        return places
    out = int((~frame["counted"].astype(bool)).sum())
    return (
        f"{places}, {whole(out)} of them (dotted) {'is' if out == 1 else 'are'} not in the count: a token there is the "
        "first of its sequence, or a special one"
    )


def draw_tokens(run: Run, word: str) -> None:
    """Draw links to the tokens that the word is cut into where it stands first."""
    rows = fetch(run, word_tokens, word=word)
    tokens = rows.loc[rows["place"] == 0, "token_id"].tolist()
    names = fetch(run, ALL_TOKENS).set_index("token_id")["text"].reindex(tokens).fillna("")
    links = [
        f'<a href="{link("token", token=token)}">{token_html(name)}</a>'
        for token, name in zip(tokens, names, strict=True)
    ]
    if links:
        st.html(f'<p class="tw-said">Its tokens: {" ".join(links)}</p>')
        draw_its_neurons(run, rows[rows["place"] == 0], names.tolist())
