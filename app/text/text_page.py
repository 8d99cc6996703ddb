"""Page Text: a passage with each token shaded by the neurons it fires, by one neuron's value, or by its surprisal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis import passage
from twell.analysis.neurons.by_neuron import parse_neuron
from twell.analysis.neurons.values import known
from twell.analysis.tokens.text_around import pieces
from twell.app.jobs.own_text import own_text
from twell.app.jobs.status import job_status
from twell.app.text.passage_view import full_bar_counts, highest_html, legend, passage_html
from twell.app.ui import widgets
from twell.app.ui.formatting import number, plural, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.run_catalog import find_runs
from twell.app.ui.url_state import current_run, one_of, parameter, run_name, sync_url, url_param, whole_number
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

PAGE_TOKENS = 1024  # tokens of a sequence that are drawn at a time
ALL_PHASES = "both"
THIS_RUN = "this run"


@dataclass(frozen=True)
class Choice:
    """What the user has chosen to see.

    Attributes:
        sequence: the sequence's number.
        shade: what shades the tokens, as `analysis.passage` names it.
        phase: the phase of generation that is shaded; None for all.
        scale_run: the run whose scale is used.
        lender: the name of that run if it is another than the one shown; otherwise None.
    """

    sequence: int
    shade: str
    phase: str | None
    scale_run: Run
    lender: str | None

    @property
    def parameters(self) -> dict[str, str]:
        """The query parameters that a link to another position of the run keeps."""
        shade = {} if self.shade == passage.ALL else {"neuron" if "/" in self.shade else "shade": self.shade}
        phase = {"phase": self.phase} if self.phase else {}
        return shade | phase | ({"scale": self.lender} if self.lender else {})

    def scale(self) -> passage.Scale:
        """Return the scale of the shades."""
        scale: passage.Scale = fetch(self.scale_run, passage.scale, shade=self.shade)
        return scale.lent_by(self.scale_run) if self.lender else scale


def shade_name(shade: str) -> str:
    """Return a shade's name in the list of shades."""
    if shade == passage.ALL:
        return "nnz, all layers"
    return "surprisal" if shade == passage.SURPRISAL else f"nnz, layer {shade[1:]}"


def to_source(sequences: pd.DataFrame) -> None:
    """Choose the first sequence of the chosen source; `sequences` are the rows of `passage.sequences`."""
    first = sequences.loc[sequences["source"] == st.session_state["source"], "sequence"].min()
    st.session_state["sequence"] = int(first)
    sync_url()


def neuron_field(run: Run) -> str:
    """Draw the field for a neuron that shades the passage; return its text, empty if the run keeps no neuron values."""
    if not known(run):
        return ""
    return st.text_input(
        "or by one neuron",
        placeholder="L3/N42",
        width=120,
        max_chars=20,
        help="Shades each token by this neuron's value, if the run keeps it.",
        **url_param("neuron", "", lambda text: neuron_name(text, run) or text),
    )


def neuron_name(text: str, run: Run) -> str | None:
    """Return the name of the neuron that a user typed, such as L3/N42; None if the run has no such neuron."""
    location = parse_neuron(text, run)
    return f"L{location[0]}/N{location[1]}" if location else None


def chosen_phase(run: Run) -> str | None:
    """Draw the choice of a phase if the run has several; return the phase, None for all."""
    phases = fetch(run, passage.phases)
    if len(phases) < 2:
        return None
    param = url_param("phase", ALL_PHASES, one_of(phases))
    phase = st.segmented_control("Phase", [ALL_PHASES, *phases], required=True, **param)
    return None if phase in (ALL_PHASES, None) else str(phase)


def chosen_scale(run: Run) -> tuple[Run, str | None]:
    """Draw the choice of a run whose scale is used, if a longer run of the same weights can lend its own.

    Returns:
        The run, and its name if it is another than `run`.
    """
    lenders = {name: other for name, other in find_runs().runs.items() if passage.can_lend(other, run)}
    if not lenders:
        return run, None
    param = url_param("scale", THIS_RUN, one_of(lenders))
    name = str(st.selectbox("Scale of", [THIS_RUN, *lenders], width=170, **param))
    return (run, None) if name == THIS_RUN else (lenders[name], name)


def chosen(run: Run, sequences: pd.DataFrame) -> Choice:
    """Draw the filters and the button for own text; return what is chosen.

    Args:
        run: the run.
        sequences: the rows of `passage.sequences`.
    """
    last = int(sequences["sequence"].max())
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        shades = passage.shades(run)
        shade = st.selectbox(
            "Shade by",
            shades,
            format_func=shade_name,
            width=190,
            **url_param("shade", passage.ALL, one_of(shades)),
        )
        neuron = neuron_field(run)
        shade = neuron_name(neuron, run) or shade
        scale_run, lender = chosen_scale(run)
        phase = chosen_phase(run)
        param = url_param(
            "sequence",
            0,
            lambda text: None if (n := whole_number(text)) is None else min(n, last),
            dependents=("position", "from"),
        )
        sequence = int(st.number_input("Sequence", 0, last, step=1, width=130, **param))
        sources = list(dict.fromkeys(sequences["source"]))
        if len(sources) > 1:
            st.session_state["source"] = sequences.set_index("sequence")["source"].get(sequence, sources[0])
            st.selectbox(
                "Source",
                sources,
                key="source",
                width=200,
                on_change=to_source,
                args=(sequences,),
            )
        own_text(run)
    if neuron and not neuron_name(neuron, run):
        widgets.no_such_neuron(run)
    return Choice(sequence, shade, phase, scale_run, lender)


def first_position(length: int, marked: int | None) -> int:
    """Return the first position of a sequence that is drawn: from the address, or the page that holds `marked`.

    Args:
        length: of the sequence, in tokens.
        marked: the marked position, or None.
    """
    begin = whole_number(parameter("from"))
    if begin is None:
        begin = (marked or 0) // PAGE_TOKENS * PAGE_TOKENS
    return min(begin, max(length - 1, 0))


def draw_pager(choice: Choice, rows: pd.DataFrame, length: int) -> None:
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


def draw_passage(run: Run, sequences: pd.DataFrame, choice: Choice) -> None:
    """Draw the passage with its legend and pager.

    Args:
        run: the run.
        sequences: the rows of `passage.sequences`.
        choice: what is chosen.
    """
    sequence, shade = choice.sequence, choice.shade
    all_rows = fetch(run, passage.passage, sequence=sequence)
    marked = whole_number(parameter("position"))
    marked = marked if marked is not None and marked < len(all_rows) else None
    begin = first_position(len(all_rows), marked)
    result = query(run, passage.passage, sequence=sequence)
    result = result.then(passage.shaded, run, shade, choice.phase, begin, PAGE_TOKENS)
    rows = result.frame
    end = begin + len(rows)
    widgets.heading(
        f"Sequence {sequence}",
        f"{source_name(sequences, sequence)}{plural(len(all_rows), 'token')}"
        f"{'' if len(rows) == len(all_rows) else f', {whole(begin)} to {whole(end - 1)} shown'}. Each token links to "
        "its page. Dotted tokens are not counted in any statistic. Beside the text: a token's nnz in each layer; a "
        "full bar is the layer's 99th percentile.",
        result,
    )
    scale = choice.scale()
    st.html(legend(scale))
    values = rows["shade"].to_numpy(float)
    if "/" in shade and not (values > 0).any():
        widgets.note(f"The run keeps no value of {shade} at these tokens. The list below shows where it is highest.")
    vocabulary = run.vocab["bytes"]
    st.html(
        passage_html(
            rows,
            pieces(vocabulary.reindex(all_rows["token_id"]))[begin:end],
            passage.token_texts(vocabulary.reindex(rows["token_id"])),
            scale.share(np.where(values == 0, np.nan, values) if "/" in shade else values),
            nnz_percentiles(choice.scale_run, rows),
            full_bar_counts(fetch(choice.scale_run, analysis.by_layer), run.layers),
            neuron_lines(values, shade),
            run_name(),
            marked,
        )
    )
    draw_pager(choice, rows, len(all_rows))


def source_name(sequences: pd.DataFrame, sequence: int) -> str:
    """Return a sequence's source and document, as the beginning of a caption; empty if it is not among `sequences`."""
    rows = sequences[sequences["sequence"] == sequence]
    if rows.empty:
        return ""
    return f"{rows['source'].iloc[0]}, document {whole(rows['document'].iloc[0])}; "


def nnz_percentiles(run: Run, rows: pd.DataFrame) -> np.ndarray:
    """Return the percentage of the run's tokens with at most as many nnz as each row of `passage`. Shape [rows]."""
    counts, percentages = fetch(run, passage.percentiles)
    index = counts.searchsorted(rows["nnz"].to_numpy(), side="right") - 1
    return np.where(index < 0, 0.0, percentages[index.clip(min=0)])


def draw_highest(run: Run, choice: Choice) -> None:
    """Draw the tokens of the run with the highest values of what shades the passage."""
    shade = choice.shade
    result = query(run, passage.loudest, shade=shade, **({"phase": choice.phase} if choice.phase else {}))
    scale = choice.scale()
    details = [f"By {scale.name}"]
    if "/" not in shade:
        details += [f"{choice.phase} only"] if choice.phase else []
        details.append("each token is listed once")
    caption = f"{'; '.join(details)}. Choose one to see it in its passage."
    widgets.heading("Highest values in the run", caption, result)
    with widgets.scanning(run):
        frame = result.frame
    st.html(highest_html(frame, run_name(), choice.parameters, scale))


def draw_page(run: Run) -> None:
    """Draw the filters, the passage, and the highest values of the run."""
    run.files("activity")  # raises Missing, with the reason, if the run has none
    if not run.has("sequences"):
        raise Missing(f"{run.name} has no text yet. It appears when the capture writes its first part.")
    sequences = fetch(run, passage.sequences)
    choice = chosen(run, sequences)
    with widgets.show_errors():
        draw_passage(run, sequences, choice)
    with widgets.show_errors():
        draw_highest(run, choice)


widgets.title("How many neurons does each token fire?")
job_status()
with widgets.show_errors():
    draw_page(current_run())
if current_run().manifest.summary_only:
    widgets.page_link("tokens", "How many neurons each token of the vocabulary fires →")
