"""The tables of page Tokens: every token, and every word, that its filters leave."""

from __future__ import annotations

import streamlit as st

from twell.analysis.figures.tokens import ranked_by
from twell.app.tokens.token_data import address_filters
from twell.app.ui import widgets
from twell.app.ui.formatting import column_form, plural, visible, whole
from twell.app.ui.query import QueryResult
from twell.app.ui.url_state import open_page, run_name

# By column of `analysis.by_token`; words have the first and the third.
RANKS = {"mean": "neurons fired", "shrunk": "z, shrunk", "z": "z", "z_position": "z at its position"}
MAX_ROWS = 5000  # of the table that go to the browser, with these columns only
COLUMNS = ["text", "token_id", "count", "sequences", "mean", "mean_se", "z", "z_se", "surprisal_mean", "loss_mean"]
WORD_COLUMNS = ["word", "count", "sequences", "documents", "pieces", "mean", "z", "z_se"]


def go_to(chosen: int | str) -> None:
    """Open the page of a token, by id, or of a word. Its address keeps the filters, for the link back."""
    what = {"word": chosen} if isinstance(chosen, str) else {"token": int(chosen)}
    open_page("token", run=run_name(), **what, **address_filters())


def first_rows_note(count: int) -> str:
    """Return a note that a table of `count` rows is cut, in brackets after a space; empty if it is not."""
    return f" (the {whole(MAX_ROWS)} most active shown)" if count > MAX_ROWS else ""


def draw_token_table(tokens: QueryResult, rank: str) -> None:
    """Draw the table of tokens; a click on a row opens the token's page.

    Args:
        tokens: the rows of `analysis.by_token` that the filters leave.
        rank: the column that they are ranked by.
    """
    frame = tokens.frame
    caption = f"{plural(len(frame), 'token')}{first_rows_note(len(frame))}. Choose a row to open the token's page."
    widgets.heading("Every token", caption, tokens)
    score = "z" if rank == "mean" else rank  # the mean has a column of its own
    rows = ranked_by(frame.head(MAX_ROWS), score)[COLUMNS]
    rows["text"] = rows["text"].map(visible)
    widgets.choosable(
        rows,
        "token-table",
        rows["token_id"],
        column_config={
            "text": st.column_config.TextColumn("token", width=130),
            "token_id": st.column_config.NumberColumn("id", format="%d"),
            "count": st.column_config.NumberColumn(
                "count", format=column_form(0), help="how often it occurs in the text"
            ),
            "sequences": st.column_config.NumberColumn(
                "sequences", format=column_form(0), help="sequences in which it occurs"
            ),
            "z": st.column_config.NumberColumn(
                RANKS[score],
                format=column_form(2, "+"),
                help="nnz in standard deviations from its layer's mean, averaged over layers",
            ),
            "z_se": st.column_config.NumberColumn(
                "standard error of z", format=column_form(2), help="clustered by document; shrunk: its posterior sd"
            ),
            "mean": st.column_config.NumberColumn(
                "mean nnz", format=column_form(1), help="neurons per layer, averaged over layers"
            ),
            "mean_se": st.column_config.NumberColumn(
                "standard error of nnz", format=column_form(1), help="of the mean, clustered by document"
            ),
            "surprisal_mean": st.column_config.NumberColumn(
                "surprisal, nats", format=column_form(2), help="loss of this token, predicted from the tokens before it"
            ),
            "loss_mean": st.column_config.NumberColumn(
                "next loss, nats", format=column_form(2), help="loss of the next token, predicted at this one"
            ),
        },
    )


def draw_word_table(words: QueryResult) -> None:
    """Draw the table of words; a click on a row opens its page. words: the rows of `by_word` that the filters leave"""
    frame = words.frame
    caption = f"{plural(len(frame), 'word')}{first_rows_note(len(frame))}. Choose a row to open the word's page."
    widgets.heading("Every word", caption, words)
    column, frame = st.column_config, frame.head(MAX_ROWS)[WORD_COLUMNS]
    widgets.choosable(
        frame.assign(word=frame["word"].map(visible)),
        "word-table",
        frame["word"],
        column_config={
            "count": column.NumberColumn("count", format=column_form(0), help="how often the word occurs in the text"),
            "sequences": column.NumberColumn("sequences", format=column_form(0), help="sequences in which it occurs"),
            "documents": column.NumberColumn("documents", format=column_form(0), help="documents in which it occurs"),
            "pieces": column.NumberColumn(
                "tokens per word", format=column_form(1), help="how many it is cut into, on average"
            ),
            "z": column.NumberColumn("z", format=column_form(2, "+"), help="mean z of the word's tokens"),
            "z_se": column.NumberColumn("standard error of z", format=column_form(2), help="clustered by document"),
            "mean": column.NumberColumn(
                "mean nnz", format=column_form(1), help="neurons per layer, averaged over layers"
            ),
        },
    )
