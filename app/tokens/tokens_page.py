"""Page Tokens: which tokens, words and classes of tokens fire the most neurons, and which the fewest."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import pandas as pd
import streamlit as st

from twell.analysis.figures import plots
from twell.analysis.figures.tokens import (
    END_ROWS,
    ENDS,
    MIN_COUNT,
    both_ends,
    class_dots,
    most_first,
    ranked_by,
    ranking,
)
from twell.analysis.memo import built_once
from twell.app.tokens.token_data import CLASSES, COVARIATES, IDENTITY, RANKING, WORDS, address_filters, ends_of_words
from twell.app.tokens.token_order import mostly_one_layer, which_order, who_decides
from twell.app.tokens.token_rows import SHOWN, rows_html
from twell.app.tokens.token_tables import RANKS, draw_token_table, draw_word_table, go_to
from twell.app.ui import widgets
from twell.app.ui.formatting import matching, message_markdown, plural, whole, with_intervals
from twell.app.ui.query import QueryResult, query
from twell.app.ui.questions import Question, draw_questions
from twell.app.ui.url_state import current_run, sync_url, url_param, whole_number
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

MAX_MIN_COUNT = 1_000_000
VIEWS = {"words": "Whole words", "tokens": "Tokens", "classes": "Classes"}
WORD_RANKS = {name: RANKS[name] for name in ("mean", "z")}
SIDES = {"most": "Most first", "fewest": "Fewest first"}
QUESTIONS = (
    Question(
        "How much the token itself decides",
        IDENTITY,
        plots.identity,
        "Share of the variance of nnz that lies between tokens of the vocabulary, by layer: of more such text (bar, "
        "the intraclass correlation) and of this run (dot, which chance raises). Near 100 % a table by token would "
        "tell a layer's nnz before it runs; what is missing to 100 % is context.",
    ),
    Question(
        "What the z of a token goes with",
        COVARIATES,
        plots.covariates,
        "Change of a token's z for one standard deviation more of each property, the others held fixed, with 95 % "
        "intervals over tokens of the vocabulary. Rare tokens differ from frequent ones in spelling and surprise too; "
        "here each has its own share.",
    ),
)
MEANING = {  # of the dots, and of their intervals
    "shrunk": ("Mean z over layers, drawn towards the mean of all tokens (empirical Bayes)", " of the posterior"),
    "word": ("Mean z of a word's tokens", " clustered by document"),
    "z": ("Mean z over layers", " clustered by document; of few, none narrower than is usual"),
    "z_position": ("Mean z over layers, compared with similar positions", " as those of z"),
}
CUT = "An interval that goes far beyond all dots is cut."


@dataclass(frozen=True)
class Filters:
    """The settings of the filters.

    Attributes:
        view: a key of VIEWS.
        min_count: how often a token or word has to occur.
        search: text that it has to contain, as `matching` compares it.
        rank: the column that orders them, a key of RANKS; of words, one of WORD_RANKS.
    """

    view: str
    min_count: int
    search: str
    rank: str


def chosen_filters(run: Run) -> Filters:
    """Draw the filters and return what they are set to, which the address carries."""
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        view = widgets.url_choice("Rank", VIEWS, "view", "tokens" if run.manifest.summary_only else "words")
        if view == "classes":
            return Filters("classes", 0, "", "shrunk")
        rank = widgets.url_choice(
            "By",
            RANKS if view == "tokens" else WORD_RANKS,
            "rank",
            "mean",
            help="Neurons fired: the mean count, which layers that fire many decide. z: standard deviations from each "
            "layer's mean, so that all layers count alike. Shrunk: drawn towards the mean of all tokens, the more the "
            "fewer documents a token occurs in. At its position: compared with the mean at similar positions.",
        )
        search = st.text_input(
            "Search",
            placeholder=f"part of a {'word' if view == 'words' else 'token'}; ␣ stands for a space",
            width=300,
            max_chars=100,
            **url_param("find", "", lambda text: text[:100]),
        )
        min_count = st.number_input(
            "Minimum count",
            1,
            MAX_MIN_COUNT,
            step=10,
            width=150,
            help="Tokens that occur less often are left out, because their means are uncertain.",
            **url_param("least", MIN_COUNT, lambda text: min(max(whole_number(text) or MIN_COUNT, 1), MAX_MIN_COUNT)),
        )
    return Filters(view, int(min_count), search, rank)


def draw_rows(run: Run, result: QueryResult, rank: str, noun: str) -> None:
    """Draw the first rows of a ranking, from the end that the user chooses; each is a link.

    Args:
        run: the run.
        result: rows of `analysis.by_token` or `analysis.by_word`, the most active first.
        rank: the column that orders them.
        noun: what a row is: token, word.
    """
    area = st.container()
    side = widgets.url_choice("Order", SIDES, "end", "most", label_visibility="collapsed")
    frame = result.frame
    shown = frame.head(SHOWN) if side == "most" else frame.tail(SHOWN)[::-1]
    ends = (
        {"most": "fire most", "fewest": "fire fewest"}
        if rank == "mean"
        else {"most": "lead by z", "fewest": "come last by z"}
    )
    told = f", {with_intervals(frame['mean_se'], ' clustered by document')}" if noun == "token" else ""
    caption = (
        f"{whole(len(shown))} of {plural(len(frame), noun)}. A dot: neurons fired a layer, mean over layers"
        f"{told}; its axis does not begin "
        "at 0. z: the same with all layers alike, in standard deviations from their means. Choose a row to open "
        f"the {noun}."
    )
    with area:
        widgets.heading(
            f"The {noun}s that {ends[side]}",
            caption,
            result,
            key="ranked",
        )
    st.html(rows_html(run, shown, rank, address_filters()))


def dots(of: str, errors: pd.Series) -> str:
    """Return what dots and their intervals mean, or that there are no intervals.

    of: one of MEANING; errors: standard errors of the dots
    """
    what, more = MEANING[of]
    return f"{what}, {with_intervals(errors, more)}.{f' {CUT}' if errors.notna().any() else ''}"


def rows_or_why_none(result: QueryResult, every: QueryResult, filters: Filters, noun: str) -> pd.DataFrame:
    """Return the rows that the filters leave; where there are none, say why, with a link to all if there are some.

    result, every: rows of `analysis.by_token` or `analysis.by_word`, as filtered and all; noun: token, word
    """
    try:
        frame = result.frame
        if frame.empty:
            st.info(f"No {noun} matches. Shorten the search, or lower the minimum count.")
        return frame
    except Missing as reason:  # a short text, in which none occurs so often
        st.info(message_markdown(str(reason)))
    with suppress(Missing):
        if filters.min_count > 1 and len(every.frame):
            kept = address_filters() | {"view": filters.view, "least": "1"}
            widgets.page_link("tokens", f"Every {noun}, however rare →", **kept)
    return pd.DataFrame()


def draw_words(run: Run, filters: Filters) -> None:
    """Draw the rows, the ranking and the table of whole words, which may be several tokens long."""
    min_count, search, rank = filters.min_count, filters.search, filters.rank
    words = query(run, WORDS.where(min_count=min_count))
    words = words.then(matching, "word", search) if search else words
    by_z = words
    words = words.then(most_first, rank) if rank != "z" else words
    frame = rows_or_why_none(words, query(run, WORDS.where(min_count=1)), filters, "word")
    if frame.empty:
        return
    asked = which_order("word", rank, min_count, run.has("activity"))
    widgets.note(f"{asked} {mostly_one_layer(run, rank, 'word')}")
    draw_rows(run, words, rank, "word")
    result = by_z.then(both_ends, END_ROWS)
    title = "Most and least active words, all layers alike"
    caption = (
        f"{who_decides(run, rank)}{dots('word', frame['z_se'])} "
        f"{plural(len(frame), 'word')} that occur at least {plural(min_count, 'time')}."
    )
    widgets.heading(title, caption, result, key="most-and-least-active-words")
    widgets.draw(ends_of_words(by_z), "words", f"{title} by z", wide=True)
    draw_word_table(words)


def draw_classes(run: Run) -> None:
    """Draw the mean z of each class of tokens."""
    result = query(run, CLASSES)
    caption = (
        f"Mean z of each class, {with_intervals(result.frame['low'], ' clustered by token of the vocabulary')}. "
        "Classes are told apart by "
        "spelling alone: a name is any capitalised word, even at the start of a sentence. After each class: its share "
        "of all tokens."
    )
    widgets.heading("Classes of tokens", caption, result)
    widgets.draw(built_once(class_dots, result.frame), "classes", "Mean z by class of tokens")


def draw_tokens(run: Run, filters: Filters) -> None:
    """Draw the ranking and the table of tokens."""
    min_count, search, rank = filters.min_count, filters.search, filters.rank
    tokens = query(run, RANKING.where(min_count=min_count, rank="shrunk" if rank == "mean" else rank))
    tokens = tokens.then(matching, "text", search) if search else tokens
    by_z = tokens
    tokens = tokens.then(most_first, rank) if rank == "mean" else tokens
    frame = rows_or_why_none(tokens, query(run, RANKING.where(min_count=1, rank="shrunk")), filters, "token")
    if frame.empty:
        return
    asked = which_order("token", rank, min_count, run.has("activity"))
    widgets.note(f"{asked} {mostly_one_layer(run, rank, 'token')}")
    draw_rows(run, tokens, rank, "token")
    by = "shrunk" if rank == "mean" else rank  # the rows above say how many neurons
    result = by_z.then(both_ends, END_ROWS)
    both = ranked_by(result.frame, by)
    title = f"Most and least active tokens{', all layers alike' if rank == 'mean' else ''}"
    caption = (
        f"{who_decides(run, rank)}{dots(by, frame[by + '_se'])} "
        f"{plural(len(frame), 'token')} that occur at least {plural(min_count, 'time')}. Choose "
        "a dot to open the token's page."
    )
    widgets.heading(title, caption, result, key="most-and-least-active-tokens")
    event = widgets.draw(
        built_once(ranking, both),
        "ranking",
        f"{title} by {RANKS[by]}",
        wide=True,
        on_select=sync_url,
        selection_mode="points",
    )
    for point in event.selection.points:
        row = both[both["end"] == ENDS[point["curve_number"]]].iloc[point["point_index"]]
        go_to(row["token_id"])
    draw_token_table(tokens, rank)


def draw_page(run: Run) -> None:
    """Draw the filters, and what they choose."""
    if (chosen := widgets.chosen_row()) is not None:
        go_to(chosen)
    for name in ("token", "word"):
        st.query_params.pop(name, None)  # the link back from a token's page may leave it in the address
    filters = chosen_filters(run)
    if filters.view == "classes":
        draw_classes(run)
    elif filters.view == "words":
        draw_words(run, filters)
    else:
        draw_tokens(run, filters)
    if filters.view != "words":
        draw_questions(run, QUESTIONS)


widgets.title("Which tokens fire the most neurons?")
with widgets.show_errors():
    draw_page(current_run())
