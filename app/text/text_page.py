"""Text: the passage itself, each token shaded by how many neurons it fires, by one of them, or by its surprisal."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis import passage as read
from twell.analysis.neurons.by_neuron import parse_neuron
from twell.analysis.neurons.values import known
from twell.analysis.tokens.text_around import pieces
from twell.app.jobs.own_text import own_text
from twell.app.jobs.status import job_status
from twell.app.text.passage_view import jumps, layer_tops, legend, passage_html
from twell.app.ui import widgets
from twell.app.ui.formatting import number, plural, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.run_catalog import find_runs
from twell.app.ui.url_state import current_run, one_of, parameter, run_name, sync_url, url_param, whole_number
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

SHOWN = 1024  # tokens of a sequence that are drawn at a time
BOTH = "both"
OWN = "this run"


@dataclass(frozen=True)
class Choice:
    """What is looked at: a sequence, what shades its tokens, one phase of generation or (None) all; and which run's
    scale it is shaded by, with the run's name where it is another's."""

    sequence: int
    shade: str
    phase: str | None
    scale_run: Run
    lender: str | None

    @property
    def address(self) -> dict[str, str]:
        """What of it a link to another place keeps."""
        kept = {} if self.shade == read.ALL else {"neuron" if "/" in self.shade else "shade": self.shade}
        kept |= {"phase": self.phase} if self.phase else {}
        return kept | ({"scale": self.lender} if self.lender else {})

    def scale(self) -> read.Scale:
        """The scale of the shades."""
        found: read.Scale = fetch(self.scale_run, read.scale, shade=self.shade)
        return found.lent_by(self.scale_run) if self.lender else found


def shade_name(shade: str) -> str:
    """A shade in the list of shades."""
    if shade == read.ALL:
        return "nnz, all layers"
    return "surprisal" if shade == read.SURPRISAL else f"nnz, layer {shade[1:]}"


def to_source(sequences: pd.DataFrame) -> None:
    """Go to the first sequence of the chosen source."""
    first = sequences.loc[sequences["source"] == st.session_state["source"], "sequence"].min()
    st.session_state["sequence"] = int(first)
    sync_url()


def asked_neuron(run: Run) -> str:
    """What was written into the field for a neuron that shades the passage, which is there where the run keeps values
    of any."""
    if not known(run):
        return ""
    return st.text_input(
        "or by one neuron",
        placeholder="L3/N42",
        width=120,
        max_chars=20,
        help="Its value at each token, where the run keeps it.",
        **url_param("neuron", "", lambda text: named(text, run) or text),
    )


def named(text: str, run: Run) -> str | None:
    """A neuron's name as it is written everywhere, however it was typed; None where the run has no such neuron."""
    place = parse_neuron(text, run)
    return f"L{place[0]}/N{place[1]}" if place else None


def chosen_phase(run: Run) -> str | None:
    """Prefill, decode or both, where the run has both."""
    there = fetch(run, read.phases)
    if len(there) < 2:
        return None
    tie = url_param("phase", BOTH, one_of(there))
    phase = st.segmented_control("Phase", [BOTH, *there], required=True, **tie)
    return None if phase in (BOTH, None) else str(phase)


def chosen_scale(run: Run) -> tuple[Run, str | None]:
    """The run whose scale to use: this one, or by its name a longer one of the same weights, where there is one."""
    lenders = {name: other for name, other in find_runs().runs.items() if read.can_lend(other, run)}
    if not lenders:
        return run, None
    tie = url_param("scale", OWN, one_of(lenders))
    name = str(st.selectbox("Scale of", [OWN, *lenders], width=170, **tie))
    return (run, None) if name == OWN else (lenders[name], name)


def chosen(run: Run, sequences: pd.DataFrame) -> Choice:
    """Sequence, shade, phase and scale, carried by the address; beside them, own text."""
    last = int(sequences["sequence"].max())
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        shades = read.shades(run)
        shade = st.selectbox(
            "Shade by",
            shades,
            format_func=shade_name,
            width=190,
            **url_param("shade", read.ALL, one_of(shades)),
        )
        asked = asked_neuron(run)
        shade = named(asked, run) or shade
        scale_run, lender = chosen_scale(run)
        phase = chosen_phase(run)
        tie = url_param(
            "sequence",
            0,
            lambda text: None if (n := whole_number(text)) is None else min(n, last),
            dependents=("position", "from"),
        )
        sequence = int(st.number_input("Sequence", 0, last, step=1, width=130, **tie))
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
    if asked and not named(asked, run):
        widgets.no_such_neuron(run)
    return Choice(sequence, shade, phase, scale_run, lender)


def beginning(length: int, at: int | None) -> int:
    """Where the stretch of a long sequence begins that is drawn: the one that holds the place, or the one asked for."""
    begin = whole_number(parameter("from"))
    if begin is None:
        begin = (at or 0) // SHOWN * SHOWN
    return min(begin, max(length - 1, 0))


def turns(choice: Choice, rows: pd.DataFrame, length: int) -> None:
    """Links to the stretches before and after."""
    begin, sequence, more = int(rows["position"].iloc[0]), choice.sequence, choice.address
    with st.container(horizontal=True, gap="medium"):
        if begin > 0:
            before = max(begin - SHOWN, 0)
            widgets.page_link("text", "← Earlier", sequence=sequence, **more, **{"from": before})
        if begin + len(rows) < length:
            widgets.page_link("text", "Later →", sequence=sequence, **more, **{"from": begin + len(rows)})


def neuron_lines(values: np.ndarray, shade: str) -> list[str]:
    """A line a token about the neuron that shades it; nothing under other shades."""
    if "/" not in shade:
        return [""] * len(values)
    return [f"{shade} " + ("not kept here" if np.isnan(v) else number(float(v)) if v else "silent") for v in values]


def the_passage(run: Run, sequences: pd.DataFrame, choice: Choice) -> None:
    """The passage with its scale."""
    sequence, shade = choice.sequence, choice.shade
    rows = fetch(run, read.passage, sequence=sequence)
    at = whole_number(parameter("position"))
    at = at if at is not None and at < len(rows) else None
    begin = beginning(len(rows), at)
    result = query(run, read.passage, sequence=sequence).then(read.shaded, run, shade, choice.phase, begin, SHOWN)
    part = result.frame
    scale = choice.scale()
    counts, reached = fetch(choice.scale_run, read.percentiles)
    place = counts.searchsorted(part["nnz"].to_numpy(), side="right") - 1
    ranks = np.where(place < 0, 0.0, reached[place.clip(min=0)])
    vocabulary = run.vocab["bytes"]
    texts = pieces(vocabulary.reindex(rows["token_id"]))
    names = read.token_texts(vocabulary.reindex(part["token_id"]))
    about = sequences.set_index("sequence").loc[sequence] if sequence in set(sequences["sequence"]) else None
    where = "" if about is None else f"{about['source']}, document {whole(about['document'])}; "
    some = "" if len(part) == len(rows) else f", {whole(begin)} to {whole(begin + len(part) - 1)} shown"
    widgets.heading(
        f"Sequence {sequence}",
        f"{where}{plural(len(rows), 'token')}{some}. Each token is a link to its page; dotted ones are in no "
        "statistic. Beside the text: the nnz of one token in each layer; a full bar is the layer's 99th percentile.",
        result,
    )
    st.html(legend(scale))
    values = part["shade"].to_numpy(float)
    if "/" in shade and not (values > 0).any():
        widgets.note(f"The run keeps no value of {shade} at these tokens. The list below shows where it is greatest.")
    shares = scale.share(np.where(values == 0, np.nan, values) if "/" in shade else values)
    tops = layer_tops(fetch(choice.scale_run, analysis.by_layer), run.layers)
    told, name = neuron_lines(values, shade), run_name()
    st.html(passage_html(part, texts[begin : begin + len(part)], names, shares, ranks, tops, told, name, at))
    turns(choice, part, len(rows))


def places(run: Run, choice: Choice) -> None:
    """The loudest places of the whole run."""
    shade = choice.shade
    result = query(run, read.loudest, shade=shade, **({"phase": choice.phase} if choice.phase else {}))
    scale = choice.scale()
    where = f"the run's {choice.phase}" if choice.phase and "/" not in shade else "the run"
    once = "" if "/" in shade else ", each token once"
    said = f"Greatest {scale.name} in {where}{once}. Choose one to see it in its passage."
    widgets.heading("Loudest places", said, result)
    with widgets.scanning(run):
        frame = result.frame
    st.html(jumps(frame, run_name(), choice.address, scale))


def page(run: Run) -> None:
    """The choices, the passage, the loudest places."""
    run.files("activity")
    if not run.has("sequences"):
        raise Missing(f"{run.name} holds no sequences yet: wait for its first part.")
    sequences = fetch(run, read.sequences)
    choice = chosen(run, sequences)
    with widgets.show_errors():
        the_passage(run, sequences, choice)
    with widgets.show_errors():
        places(run, choice)


widgets.title("What does each token of the text fire?")
job_status()
with widgets.show_errors():
    page(current_run())
if current_run().manifest.summary_only:
    widgets.page_link("tokens", "What each token of the vocabulary fires →")
