"""Finding a passage: by words in it, or by its first words and its source."""

from __future__ import annotations

import html

import pandas as pd
import streamlit as st

from twell.analysis.tokens.text_search import SOUGHT, beginnings, places_of
from twell.app.ui import widgets
from twell.app.ui.formatting import plural, running, visible, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import link, parameter, sync_url, url_param, whole_number
from twell.workbench.run.store import Run

FOUND = 20  # places listed
LISTED = 500  # passages of the list of all
NAME = 60  # characters of a passage's name


def search_field() -> str:
    """Draw the field for words that a passage has to contain; return them."""
    words = st.text_input(
        "Search the text",
        placeholder="words in a passage",
        width=200,
        max_chars=100,
        **url_param("find", "", lambda text: text[:100]),
    )
    return words.strip()


def draw_results(run: Run, words: str) -> None:
    """Draw the passages of the run that contain the words: a link to each place."""
    result = query(run, places_of, words=words, limit=FOUND)
    with widgets.scanning(run):
        frame = result.frame
    if frame.empty:
        widgets.note(f"No passage contains {html.escape(visible(words))}.")
        return
    count = frame.attrs["count"]
    every = f"{whole(count)} or more places" if count == SOUGHT else plural(count, "place")
    listed = f"The first {FOUND} of {every}" if count > FOUND else every
    widgets.heading(f"{listed} with these words", "", result, key="found")
    lines = [
        f'<a class="tw-jump" href="'
        f'{link("text", sequence=row.sequence, position=row.position, to=row.last, find=words)}">'
        f'<span class="where">{row.sequence}:{row.position}</span>'
        f'<span class="before"><span>{html.escape(running(row.before[-60:]))}</span></span>'
        f'<mark class="token">{html.escape(visible(row.token))}</mark>'
        f'<span class="after">{html.escape(running(row.after[:60]))}</span><span class="number"></span></a>'
        for row in frame.itertuples()
    ]
    st.html(f'<div class="tw-places tw-found">{"".join(lines)}</div>')


def found_from(begin: int | None) -> range:
    """Return the positions that the address marks: from `begin`, None for no mark, to the last one of words found."""
    return range(0) if begin is None else range(begin, max(begin, whole_number(parameter("to")) or 0) + 1)


def passages_button(run: Run) -> None:
    """Draw the button under which all passages are listed, by first words and source."""
    with st.popover("Passages", key="passages", on_change=sync_url) as popover:
        if not popover.open:
            return
        frame = fetch(run, beginnings)
        limit = f", the first {whole(LISTED)} listed; search for words, or type a number" if len(frame) > LISTED else ""
        widgets.note(f"{plural(len(frame), 'passage')}{limit}.", width=560)
        lines = [
            f'<a class="tw-title-row" href="{link("text", sequence=row.sequence)}"><span>{row.sequence}</span>'
            f"<span>{html.escape(passage_name(row.text))}</span><span>{html.escape(str(row.source))}</span></a>"
            for row in frame.head(LISTED).itertuples()
        ]
        st.html(f'<div class="tw-titles">{"".join(lines)}</div>')


def passage_name(text: str) -> str:
    """Return the name of a passage: its first words, up to NAME characters."""
    seen = running(" ".join(text.split()))
    cut = seen if len(seen) <= NAME else seen[:NAME].rpartition(" ")[0] or seen[:NAME]
    return f"{cut} …" if cut else "(no text)"


def name_of(rows: pd.DataFrame, texts: list[str]) -> str:
    """Return the name of the passage whose tokens' texts, in order, are `texts`; `rows` are those of `passage`."""
    return passage_name("".join(texts[: min(len(rows), 24)]))
