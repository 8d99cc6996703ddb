"""Text: the passage itself, every token shaded by how many neurons it fires, or by how unexpected it is."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from twell.app import own, parts
from twell.app import passage as read
from twell.app.passage_view import jumps, layer_tops, legend, passage_html
from twell.app.state import ask, bound, parameter, shown, whole_number
from twell.app.words import plural, whole
from twell.workbench.errors import Missing
from twell.workbench.store import Run

SHOWN = 1024  # tokens of a sequence that are drawn at a time


def shade_name(shade: str) -> str:
    """A shade in the list of shades."""
    if shade == read.ALL:
        return "nnz, all layers"
    return "surprisal" if shade == read.SURPRISAL else f"nnz, layer {shade[1:]}"


def to_source(sequences: pd.DataFrame) -> None:
    """Go to the first sequence of the chosen source."""
    first = sequences.loc[sequences["source"] == st.session_state["source"], "sequence"].min()
    for gone in ("position", "from"):
        st.query_params.pop(gone, None)
    st.query_params["sequence"] = str(int(first))


def chosen(run: Run, sequences: pd.DataFrame) -> tuple[int, str]:
    """Sequence and shade, carried by the address; beside them, own text."""
    last = int(sequences["sequence"].max())
    tie = bound("sequence", 0, lambda text: None if (n := whole_number(text)) is None else min(n, last))

    def turn() -> None:
        for gone in ("position", "from"):
            st.query_params.pop(gone, None)
        tie["on_change"]()

    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        shades = read.shades(run)
        shade = st.selectbox(
            "Shade by",
            shades,
            format_func=shade_name,
            width=190,
            **bound("shade", read.ALL, lambda text: text if text in shades else None),
        )
        sequence = int(st.number_input("Sequence", 0, last, step=1, width=150, key="sequence", on_change=turn))
        sources = list(dict.fromkeys(sequences["source"]))
        if len(sources) > 1:
            st.session_state["source"] = sequences.set_index("sequence")["source"].get(sequence, sources[0])
            st.selectbox(
                "Source",
                sources,
                key="source",
                width=230,
                on_change=to_source,
                args=(sequences,),
            )
        own.own_text(run)
    return sequence, shade


def window(rows: pd.DataFrame, at: int | None) -> pd.DataFrame:
    """The stretch of a long sequence that is drawn: the one that holds the place, or the one asked for."""
    begin = whole_number(parameter("from"))
    if begin is None:
        begin = (at or 0) // SHOWN * SHOWN
    begin = min(begin, max(len(rows) - 1, 0))
    return rows.iloc[begin : begin + SHOWN]


def turns(run: Run, sequence: int, rows: pd.DataFrame, length: int, shade: str) -> None:
    """Links to the stretches before and after."""
    begin = int(rows["position"].iloc[0])
    more = {} if shade == read.ALL else {"shade": shade}
    with st.container(horizontal=True, gap="medium"):
        if begin > 0:
            before = max(begin - SHOWN, 0)
            parts.linked("text.py", "← Earlier", sequence=sequence, **more, **{"from": before})
        if begin + len(rows) < length:
            parts.linked("text.py", "Later →", sequence=sequence, **more, **{"from": begin + len(rows)})


def the_passage(run: Run, sequences: pd.DataFrame, sequence: int, shade: str) -> None:
    """The passage with its scale."""
    rows = ask(run, read.passage, sequence=sequence)
    at = whole_number(parameter("position"))
    at = at if at is not None and at < len(rows) else None
    part = window(rows, at)
    scale = ask(run, read.scale, shade=shade)
    counts, reached = ask(run, read.percentiles)
    place = counts.searchsorted(part["nnz"].to_numpy(), side="right") - 1
    ranks = reached[place.clip(min=0)]
    vocabulary = run.vocab["bytes"]
    texts = read.pieces(vocabulary.reindex(rows["token_id"]))
    offset = int(part.index[0])
    names = [run.decode([token]) for token in part["token_id"]]
    about = sequences.set_index("sequence").loc[sequence] if sequence in set(sequences["sequence"]) else None
    where = "" if about is None else f"{about['source']}, document {whole(about['document'])}; "
    some = "" if len(part) == len(rows) else f", {whole(part.index[0])} to {whole(part.index[-1])} shown"
    parts.heading(
        f"Sequence {sequence}",
        f"{where}{plural(len(rows), 'token')}{some}. Each token is a link to its page; dotted ones are in no "
        "statistic.",
        part,
        run,
        f'run.activity().query("sequence == {sequence}")',
    )
    st.html(legend(scale))
    shares = scale.share(read.values(part, run, shade))
    tops = layer_tops(ask(run, "by_layer"), run.layers)
    markup = passage_html(
        part, texts[offset : offset + len(part)], names, shares, ranks, tops, st.session_state["run"], at
    )
    st.html(markup)
    turns(run, sequence, part, len(rows), shade)


def places(run: Run, shade: str) -> None:
    """The loudest places of the whole run."""
    frame = ask(run, read.loudest, shade=shade)
    scale = ask(run, read.scale, shade=shade)
    said = f"Greatest {scale.name} of the run, each token once. Choose one to see it in its passage."
    parts.heading("Loudest places", said, frame, run, read.code(run, shade))
    st.html(jumps(frame, st.session_state["run"], shade, scale))


def page(run: Run) -> None:
    """The choices, the passage, the loudest places."""
    run.parts("activity")
    if not run.has("sequences"):
        raise Missing(f"{run.name} holds no sequences yet: wait for its first part.")
    sequences = ask(run, read.sequences)
    sequence, shade = chosen(run, sequences)
    with parts.told():
        the_passage(run, sequences, sequence, shade)
    with parts.told():
        places(run, shade)


parts.title("What does each token of the text fire?")
own.job_status("text")
with parts.told():
    page(shown())
