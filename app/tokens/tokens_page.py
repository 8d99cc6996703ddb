"""Tokens: which tokens fire the most neurons, and which the fewest."""

from __future__ import annotations

import streamlit as st

from twell.app.tokens.token_data import CLASSES, ENDS, MIN_COUNT, RANKING, WORDS, address_filters, both_ends, ranked_by
from twell.app.tokens.token_figures import class_dots, ranking
from twell.app.ui import widgets
from twell.app.ui.formatting import matching, plural, visible, whole
from twell.app.ui.query import QueryResult, query
from twell.app.ui.url_state import current_run, one_of, open_page, run_name, sync_url, url_param, whole_number
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

EACH = 15  # tokens at each end of the ranking
MOST = 1_000_000  # the largest minimum count
VIEWS = {"tokens": "Tokens", "words": "Whole words", "classes": "Classes"}
MEANS = {"z": "the layer", "z_position": "layer and position"}  # what a token's nnz is measured from
ROWS = 5000  # rows of the table that go to the browser, with these columns and no other
COLUMNS = ["text", "token_id", "count", "sequences", "z", "z_se", "mean", "mean_se", "surprisal_mean", "loss_mean"]


def chosen_filters() -> tuple[str, int, str, str]:
    """What is ranked, minimum count, search text and what nnz is measured from, carried by the address."""
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        view = st.segmented_control(
            "Rank",
            list(VIEWS),
            format_func=lambda v: VIEWS[v],
            required=True,
            **url_param("view", "tokens", one_of(VIEWS)),
        )
        if view == "classes":
            return "classes", 0, "", "z"
        rank = "z"
        if view == "tokens":
            rank = st.segmented_control(
                "Against the mean of",
                list(MEANS),
                format_func=lambda r: MEANS[r],
                required=True,
                help="Layer and position: of tokens at similar positions, as early ones fire more in some models.",
                **url_param("rank", "z", one_of(MEANS)),
            )
        search = st.text_input(
            "Search",
            placeholder=f"part of a {'word' if view == 'words' else 'token'}; ␣ stands for a space",
            width=300,
            max_chars=100,
            **url_param("find", "", lambda text: text[:100]),
        )
        least = st.number_input(
            "Seen at least, times",
            1,
            MOST,
            step=10,
            width=150,
            help="Tokens that occur less often are left out, because their means are uncertain.",
            **url_param("least", MIN_COUNT, lambda text: min(max(whole_number(text) or MIN_COUNT, 1), MOST)),
        )
    return str(view), int(least), search, str(rank)


def go_to(token: int) -> None:
    """Open a token's page. Its address keeps the filters, for the way back."""
    open_page("token", run=run_name(), token=int(token), **address_filters())


def table(left: QueryResult, rank: str) -> None:
    """Every token that the filters leave, with the z that they are ranked by; a click on a row opens the token's
    page."""
    frame = left.frame
    cut = f", the {whole(ROWS)} loudest shown" if len(frame) > ROWS else ""
    said = f"{plural(len(frame), 'token')}{cut}. Choose a row to open the token's page."
    widgets.heading("Every token", said, left)
    rows = ranked_by(frame.head(ROWS), rank)[COLUMNS]
    rows["text"] = rows["text"].map(visible)
    event = st.dataframe(
        rows,
        hide_index=True,
        height=420,
        on_select=sync_url,
        selection_mode="single-row",
        key="token-table",
        column_config={
            "text": st.column_config.TextColumn("token", width=130),
            "token_id": st.column_config.NumberColumn("id", format="%d"),
            "count": st.column_config.NumberColumn("count", format="%d", help="how often it occurs in the text"),
            "sequences": st.column_config.NumberColumn("sequences", format="%d", help="sequences in which it occurs"),
            "z": st.column_config.NumberColumn(
                "z", format="%+.2f", help="nnz in standard deviations from its layer's mean, averaged over layers"
            ),
            "z_se": st.column_config.NumberColumn(
                "± se", format="%.2f", help="standard error of z, clustered by sequence"
            ),
            "mean": st.column_config.NumberColumn(
                "mean nnz", format="%.1f", help="neurons a layer, averaged over layers"
            ),
            "mean_se": st.column_config.NumberColumn(
                "± se", format="%.1f", help="standard error of the mean, clustered by sequence"
            ),
            "surprisal_mean": st.column_config.NumberColumn(
                "surprisal, nats", format="%.2f", help="loss of this token, predicted from the tokens before it"
            ),
            "loss_mean": st.column_config.NumberColumn(
                "next loss, nats", format="%.2f", help="loss of the next token, predicted at this one"
            ),
        },
    )
    if event.selection.rows:
        go_to(rows.iloc[event.selection.rows[0]]["token_id"])


def words(run: Run, least: int, search: str) -> None:
    """Whole words, whatever tokens they are cut into."""
    left = query(run, WORDS.where(min_count=least))
    left = left.then(matching, "word", search) if search else left
    frame = left.frame
    if frame.empty:
        st.info("No word is left: shorten the search, or lower the minimum count.")
        return
    result = left.then(both_ends, EACH)
    said = (
        f"Mean z of a word's tokens with 95 % intervals, clustered by sequence, of {plural(len(frame), 'word')} seen "
        f"at least {plural(least, 'time')}."
    )
    widgets.heading("Loudest and quietest words", said, result)
    both = result.frame.rename(columns={"word": "text"}).assign(token_id=-1)
    widgets.draw(ranking(both), "words", "Loudest and quietest words by z", wide=True)
    cut = f", the {whole(ROWS)} loudest shown" if len(frame) > ROWS else ""
    widgets.heading("Every word", f"{plural(len(frame), 'word')}{cut}.", left)
    column = st.column_config
    st.dataframe(
        frame.head(ROWS).assign(word=frame["word"].head(ROWS).map(visible)),
        hide_index=True,
        height=420,
        column_config={
            "count": column.NumberColumn("count", format="%d", help="how often the word occurs in the text"),
            "sequences": column.NumberColumn("sequences", format="%d", help="sequences in which it occurs"),
            "pieces": column.NumberColumn("tokens per word", format="%.1f"),
            "z": column.NumberColumn("z", format="%+.2f", help="mean z of the word's tokens"),
            "z_se": column.NumberColumn("± se", format="%.2f", help="standard error of z, clustered by sequence"),
            "mean": column.NumberColumn("mean nnz", format="%.1f", help="neurons a layer, averaged over layers"),
        },
    )


def classes(run: Run) -> None:
    """Kinds of tokens, told apart by their spelling."""
    result = query(run, CLASSES)
    said = (
        "Mean z of each class of tokens, with 95 % intervals; the units are tokens of the vocabulary. Classes go by "
        "spelling alone: a name is any capitalised word, also at the start of a sentence. Beside each class: its share "
        "of all tokens."
    )
    widgets.heading("Classes of tokens", said, result)
    widgets.draw(class_dots(result.frame), "classes", "Mean z by class of tokens")


def page(run: Run) -> None:
    """The filters, the two ends of the ranking, and the table."""
    st.query_params.pop("token", None)  # where the way back from a token's page has left one
    view, least, search, rank = chosen_filters()
    if view == "classes":
        classes(run)
        return
    if view == "words":
        words(run, least, search)
        return
    left = query(run, RANKING.where(min_count=least, rank=rank))
    left = left.then(matching, "text", search) if search else left
    try:
        frame = left.frame
    except Missing as reason:  # a short text, where no token stands so often
        st.info(widgets.escape_markdown(str(reason)))
        if least > 1:
            widgets.page_link("tokens", "Every token, however rare →", **address_filters() | {"least": "1"})
        return
    if frame.empty:
        st.info("No token is left: shorten the search, or lower the minimum count.")
        return
    result = left.then(both_ends, EACH)
    both = ranked_by(result.frame, rank)
    said = (
        f"Mean z over layers with 95 % intervals, clustered by sequence, of {plural(len(frame), 'token')} seen at "
        f"least {plural(least, 'time')}; z against the mean of {MEANS[rank]}. Choose a dot to open "
        "the token's page."
    )
    widgets.heading("Loudest and quietest", said, result)
    event = widgets.draw(
        ranking(both),
        "ranking",
        "Loudest and quietest tokens by z",
        wide=True,
        on_select=sync_url,
        selection_mode="points",
    )
    for point in event.selection.points:
        chosen = both[both["end"] == ENDS[point["curve_number"]]].iloc[point["point_index"]]
        go_to(chosen["token_id"])
    table(left, rank)


widgets.title("Which tokens fire the most neurons?")
with widgets.show_errors():
    page(current_run())
