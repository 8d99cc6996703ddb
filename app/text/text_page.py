"""Page Text: a passage with each token shaded by the neurons it fires, by one neuron's value, or by its surprisal."""

from __future__ import annotations

import numpy as np
import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis import passage
from twell.analysis.neurons.at_token import neurons_at
from twell.analysis.tokens.text_around import pieces
from twell.app.jobs.asking import model_request, passage_anew, prepare
from twell.app.jobs.own_text import own_actions, own_reading, own_text_button
from twell.app.jobs.status import job_status
from twell.app.text.choices import PassageChoice, chosen
from twell.app.text.passage_view import full_bar_counts, highest_html, legend, passage_html
from twell.app.text.search_view import found_from, name_of
from twell.app.text.silenced_view import draw_what_if
from twell.app.text.token_view import MarkedToken, draw_token, draw_way_to_neurons
from twell.app.ui import widgets
from twell.app.ui.formatting import number, plural, whole
from twell.app.ui.query import QueryResult, fetch, query
from twell.app.ui.run_catalog import find_runs
from twell.app.ui.url_state import current_run, parameter, run_name, say_unmet, whole_number
from twell.workbench.errors import Missing
from twell.workbench.run.schema import DECODE
from twell.workbench.run.store import Run

PAGE_TOKENS = 1024  # tokens of a sequence that are drawn at a time


def first_position(length: int, marked: int | None) -> int:
    """Return the first position of a sequence that is drawn: from the address, or the page that holds `marked`.

    Args:
        length: of the sequence, in tokens.
        marked: the marked position, or None.
    """
    begin = whole_number(parameter("from"))
    if begin is None:
        begin = (marked or 0) // PAGE_TOKENS * PAGE_TOKENS
    elif begin >= length > 0:
        say_unmet("from", f"the passage has {plural(length, 'token')}", f"{length - 1} is shown")
    return min(begin, max(length - 1, 0))


def marked_position(length: int) -> int | None:
    """Return the position that the address marks, or None; have the page say so if the passage, `length` tokens long,
    has no such position."""
    marked = whole_number(parameter("position"))
    if parameter("position") and (marked is None or marked >= length):
        say_unmet("position", f"the passage has {plural(length, 'token')}, 0 to {length - 1}", "none is marked")
        return None
    return marked


def draw_pager(choice: PassageChoice, rows: pd.DataFrame, length: int) -> None:
    """Draw links to the tokens before and after those drawn.

    Args:
        choice: what is chosen, which the links keep.
        rows: the rows of `passage` that are drawn.
        length: of the sequence, in tokens.
    """
    begin = int(rows["position"].iloc[0])
    end = begin + len(rows)
    parameters = {"sequence": choice.sequence, **choice.parameters}
    with st.container(horizontal=True, gap="medium"):
        if begin > 0:
            widgets.page_link("text", "← Earlier", **parameters, **{"from": max(begin - PAGE_TOKENS, 0)})
        if end < length:
            widgets.page_link("text", "Later →", **parameters, **{"from": end})


def neuron_lines(values: np.ndarray, shade: str) -> list[str]:
    """Return a line of the tooltip for each of a neuron's values, or empty lines if no neuron shades the passage."""
    if "/" not in shade:
        return [""] * len(values)
    return [f"{shade} " + ("not kept here" if np.isnan(v) else number(float(v)) if v else "silent") for v in values]


def draw_passage(sequences: pd.DataFrame, choice: PassageChoice, anew: Run | None) -> None:
    """Draw the passage with its legend and pager, and the neurons of the marked token.

    Args:
        sequences: the rows of `passage.sequences`.
        choice: what is chosen.
        anew: a run of this passage alone, which keeps all its firings; None if the model was not asked for it.
    """
    run, sequence, shade = choice.shown, choice.sequence, choice.shade
    all_rows = fetch(run, passage.passage, sequence=sequence)
    marked = marked_position(len(all_rows))
    begin = first_position(len(all_rows), marked)
    step = passage.shaded if anew is None or "/" not in shade else passage.shaded_anew
    result = query(run, passage.passage, sequence=sequence)
    result = result.then(step, anew if step is passage.shaded_anew else run, shade, choice.phase, begin, PAGE_TOKENS)
    rows = result.frame
    end = begin + len(rows)
    can_name = choice.can_ask or run.has("fired")
    vocabulary = run.vocab["bytes"]
    texts = pieces(vocabulary.reindex(all_rows["token_id"]))
    draw_heading(sequences, choice, name_of(all_rows, texts), (begin, end, len(all_rows)), can_name, result)
    scale = choice.scale()
    st.html(legend(scale))
    names = passage.token_texts(vocabulary.reindex(rows["token_id"]))
    seen = marked if marked is not None and begin <= marked < end else None
    if can_name:
        to_itself = {"sequence": sequence, **choice.parameters}
        draw_way_to_neurons(rows, names, None if seen is None else seen - begin, to_itself)
    values = rows["shade"].to_numpy(float)
    if "/" in shade and not (values > 0).any():
        note_unshaded(choice, anew)
    st.html(
        passage_html(
            rows,
            texts[begin:end],
            names,
            scale.share(np.where(values == 0, np.nan, values) if "/" in shade else values),
            nnz_percentiles(choice.scale_run, rows),
            full_bar_counts(fetch(choice.scale_run, analysis.by_layer), run.layers),
            neuron_lines(values, shade),
            run_name(),
            found_from(marked),
            {"sequence": sequence, **choice.parameters} if can_name else None,
        )
    )
    draw_pager(choice, rows, len(all_rows))
    if anew is not None and "/" in shade:
        with widgets.show_errors():
            draw_what_if(choice, anew)
    if seen is not None:
        with widgets.show_errors():
            draw_neurons(choice, rows, seen, names[seen - begin], anew)


def draw_heading(
    sequences: pd.DataFrame,
    choice: PassageChoice,
    name: str,
    stretch: tuple[int, int, int],
    names_neurons: bool,
    result: QueryResult,
) -> None:
    """Draw the heading of the passage: its first words, its source, and what a click on a token does.

    Args:
        sequences: the rows of `passage.sequences`.
        choice: what is chosen.
        name: the passage's first words.
        stretch: the first position drawn, the one after the last, and the length of the passage.
        names_neurons: whether a token links to the neurons that it fires.
        result: the rows that are drawn.
    """
    begin, end, length = stretch
    made = "; those in italics were generated" if (result.frame["phase"] == DECODE).any() else ""
    widgets.heading(
        "Your text" if choice.own else name,
        f"{source_caption(sequences, choice)}{plural(length, 'token')}"
        f"{'' if end - begin == length else f', {whole(begin)} to {whole(end - 1)} shown'}. Choose a token to see "
        f"{'the neurons that it fires' if names_neurons else 'its page'}. Dotted tokens are not counted in any "
        f"statistic{made}. Beside the text: a token's nnz in each layer; a full bar is the layer's 99th percentile.",
        result,
        key="passage",
    )


def note_unshaded(choice: PassageChoice, anew: Run | None) -> None:
    """Draw a note under the legend of a neuron that shades no token of the passage."""
    widgets.note(
        f"{choice.shade} fires on none of these tokens."
        if anew is not None or choice.own
        else f"The run keeps no value of {choice.shade} at these tokens. The list below shows where it is highest."
    )


def draw_neurons(choice: PassageChoice, rows: pd.DataFrame, marked: int, name: str, anew: Run | None) -> None:
    """Draw the neurons of the marked token, read anew by the model where the run keeps none of them.

    Args:
        choice: what is chosen.
        rows: the rows of the passage that are drawn.
        marked: the token's position.
        name: the token by itself.
        anew: as in `draw_passage`.
    """
    begin, source, sequence = int(rows["position"].iloc[0]), choice.shown, choice.sequence
    if anew is None and choice.can_ask and not keeps(source, sequence, marked):
        anew = passage_anew(source, sequence)
    action = ""
    if anew is not None:
        source, sequence, action = anew, 0, f"Computed now, on {anew.manifest.device}."
    parameters = {**choice.parameters, "sequence": str(choice.sequence), "position": str(marked)}
    row = rows.iloc[marked - begin]
    token = MarkedToken(source, sequence, row, name, begin, begin + len(rows), parameters, action)
    draw_token(token, choice.scale_run, choice.lender or current_run().name)


def keeps(run: Run, sequence: int, position: int) -> bool:
    """Return whether a run keeps the neurons that a token fires."""
    try:
        fetch(run, neurons_at, sequence=sequence, position=position)
    except Missing:
        return False
    return True


def source_caption(sequences: pd.DataFrame, choice: PassageChoice) -> str:
    """Return a sequence's source and document, as the beginning of a caption; empty if it is not among `sequences`, or
    of the user's own text."""
    rows = sequences[sequences["sequence"] == choice.sequence]
    if rows.empty or choice.own:
        return ""
    source, document = rows["source"].iloc[0], whole(rows["document"].iloc[0])
    return f"Sequence {choice.sequence}, {source}, document {document}; "


def nnz_percentiles(run: Run, rows: pd.DataFrame) -> np.ndarray:
    """Return the percentage of the run's tokens with at most as many nnz as each row of `passage`. Shape [rows]."""
    counts, percentages = fetch(run, passage.percentiles)
    index = counts.searchsorted(rows["nnz"].to_numpy(), side="right") - 1
    return np.where(index < 0, 0.0, percentages[index.clip(min=0)])


def draw_highest(choice: PassageChoice) -> None:
    """Draw the tokens of the run with the highest values of what shades the passage."""
    run, shade = choice.shown, choice.shade
    result = query(run, passage.loudest, shade=shade, **({"phase": choice.phase} if choice.phase else {}))
    with widgets.scanning(run):
        frame = result.frame
    scale = choice.scale()
    if len(frame) and not frame["value"].any():  # they would be whichever tokens come first
        raise Missing(f"By {scale.name}, every counted token of {run.name} has 0: none has the highest value.")
    details = [f"By {scale.name}"]
    if "/" not in shade:
        details += [f"{choice.phase} only"] if choice.phase else []
        details.append("each token is listed once")
    caption = f"{'; '.join(details)}. Choose one to see it in its passage."
    widgets.heading("Highest values in your text" if choice.own else "Highest values in the run", caption, result)
    st.html(highest_html(frame, run_name(), choice.parameters, scale))


def own_or_none(run: Run) -> Run | None:
    """Return the run of the user's own text that the address names, or None; say so if there is none any more."""
    with widgets.show_errors():
        own = own_reading()
        if own is not None:
            own_actions(own)
        return own
    return None


def draw_page(run: Run) -> None:
    """Draw the filters, the passage, and the highest values of the run; or of the user's own text."""
    own = own_or_none(run)
    if own is None:
        try:
            run.files("activity")  # raises Missing, with the reason, if the run has none
            if not run.has("sequences"):
                raise Missing(f"{run.name} has no text yet. It appears when the capture writes its first part.")
        except Missing:
            own_text_button(run)
            if run.manifest.summary_only:  # which stands above every page of such a run
                return
            raise
    shown = own or run
    sequences = fetch(shown, passage.sequences)
    can_ask = model_request(run) is not None
    if can_ask:
        prepare()
    choice = chosen(run, shown, sequences, can_ask, own is not None, own_text_button)
    with widgets.show_errors():
        anew = None
        with widgets.show_errors():
            anew = passage_anew(run, choice.sequence) if choice.can_ask and "/" in choice.shade else None
        draw_passage(sequences, choice, anew)
    with widgets.show_errors():
        draw_highest(choice)


def link_to_text(run: Run) -> None:
    """Draw a link to a run that keeps its text, the longest of a model of the same shape if there is one."""

    def shape(one: Run) -> tuple[object, ...]:
        return one.layers, one.d_ff, one.manifest.model.get("d_model"), one.manifest.tokenizer.get("vocab_size")

    texts = {n: one for n, one in find_runs().runs.items() if one.has("activity") and one.has("sequences")}
    name = max(texts, key=lambda n: (shape(texts[n]) == shape(run), texts[n].manifest.tokens), default="")
    if name:
        model = "a model of the same shape" if shape(texts[name]) == shape(run) else "another model"
        widgets.page_link("text", f"{texts[name].name}, a run of {model}, keeps its text →", run=name)


widgets.title("Which neurons does each token fire, and how many?")
job_status()
with widgets.show_errors():
    draw_page(current_run())
if current_run().manifest.summary_only:
    widgets.page_link("tokens", "How many neurons each token of the vocabulary fires →")
    link_to_text(current_run())
