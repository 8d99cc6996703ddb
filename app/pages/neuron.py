"""Neuron: one neuron, by an address of its own (L7/N1234): how often, how strongly and on what text it fires."""

from __future__ import annotations

import html
from urllib.parse import urlencode

import numpy as np
import pandas as pd
import streamlit as st

from twell.app import parts
from twell.app import passage as read
from twell.app.neuron_data import one_neuron, parse
from twell.app.neuron_figures import rank_curve
from twell.app.passage_view import opacity
from twell.app.state import ask, parameter, shown
from twell.app.words import SPACE, number, percent, plural, running, token_html, whole
from twell.workbench.errors import Missing
from twell.workbench.store import Run

SIDE = 16  # tokens that a window holds on either side


def facts(run: Run, row: dict[str, object]) -> None:
    """The neuron's numbers, each with what it is of."""
    tokens, fires = int(str(row["tokens"])), int(str(row["fires"]))
    out_of = f"{plural(tokens, 'token')} of {plural(run.manifest.sequences, 'sequence')}"
    density = (
        ("Density", percent(float(str(row["density"]))), f"fires on {whole(fires)} of {out_of}")
        if fires
        else ("Density", f"<{SPACE}{number(3e6 / tokens, 2)} per million", f"never fired in {out_of} (95 % bound)")
    )
    never = "it never fired"
    values = (
        density,
        ("Rank in its layer", whole(float(str(row["rank"]))), f"by density, of {whole(run.d_ff)} neurons"),
        ("Mean value", number(float(str(row["value_mean"]))), "over the tokens that fire it" if fires else never),
        ("Largest value", number(float(str(row["value_max"]))), "in the run" if fires else never),
    )
    parts.numbers(values)
    if row["one_token"]:
        st.html(
            f'<p class="tw-said">Only one token of the vocabulary fires it: {token_html(str(row["token_text"]))}</p>'
        )
    if fires and run.has("activity"):
        parts.linked("text.py", "The first sequence that fires it →", sequence=row["first_sequence"])


def in_layer(run: Run, row: dict[str, object], densities: np.ndarray) -> None:
    """Where the neuron stands among those of its layer."""
    layer = int(str(row["layer"]))
    frame = pd.DataFrame({"rank": np.arange(1, len(densities) + 1), "density": densities})
    dead = int((densities == 0).sum())
    said = f"Every neuron of layer {layer}, the busiest first, both axes logarithmic; {whole(dead)} never fired."
    code = f'analysis.by_neuron(run, layer={layer}).sort_values("density", ascending=False)'
    parts.heading("In its layer", said, frame, run, code)
    figure = rank_curve(densities, int(str(row["rank"])), float(str(row["density"])), str(row["label"]))
    parts.draw(figure, "rank", "Densities of the layer's neurons by rank")


def in_text(run: Run, layer: int, neuron: int) -> None:
    """The text that fires it, each token shaded by the neuron's value there."""
    if not run.has("examples"):
        parts.heading("In the text")
        why = "it is a summary-only run" if run.manifest.summary_only else "it was captured without them"
        raise Missing(f"{run.name} keeps no examples of neurons: {why}. Capture with --examples 8 to see them here.")
    frame = ask(run, "examples", layer=layer, neuron=neuron)
    top, sample = frame[frame["kind"] == "top"], frame[frame["kind"] == "sample"]
    high = float(frame["value"].max())
    said = (
        f"The {plural(len(top), 'greatest value')} of the run, then {plural(len(sample), 'firing')} drawn at random, "
        f"greatest first. Each token is shaded by the neuron's value there, from 0 to {number(high)}."
    )
    data = frame.drop(columns="window")
    parts.heading("In the text", said, data, run, f"analysis.examples(run, {layer}, {neuron})")
    for name, part in (("Greatest", top), ("Drawn at random", sample)):
        if len(part):
            st.html(f'<h4 class="tw-part">{name}</h4>{lines(run, part, high)}')


def lines(run: Run, frame: pd.DataFrame, high: float) -> str:
    """A line an example: where, its text with the values as shades, the value."""
    out = ['<div class="tw-places">']
    for row in frame.itertuples():
        rows = ask(run, read.passage, sequence=int(row.sequence))
        window = dict(zip(range(row.position - SIDE, row.position + SIDE + 1), row.window, strict=False))
        texts = read.pieces(run.vocab["bytes"].reindex(rows["token_id"]))
        spans = []
        for place in range(max(0, row.position - SIDE), min(len(texts), row.position + SIDE + 1)):
            value = window.get(place, 0.0)
            share = 0.0 if not value > 0 else min(value / max(high, 1e-9), 1.0)
            shade = f' style="background:rgba(47,126,216,{opacity(share):.3f})"' if share else ""
            mark = ' class="here"' if place == row.position else ""
            tip = f' title="{number(float(value))}"' if share else ""
            spans.append(f"<span{mark}{shade}{tip}>{html.escape(running(texts[place]))}</span>")
        query = {"run": st.session_state["run"], "sequence": row.sequence, "position": row.position}
        address = html.escape("text?" + urlencode(query), quote=True)
        out.append(
            f'<div class="tw-example"><a class="where" href="{address}">{row.sequence}:{row.position}</a>'
            f'<span class="words">{"".join(spans)}</span><span class="number">{number(float(row.value))}</span></div>'
        )
    return "".join([*out, "</div>"])


def neighbours(run: Run, layer: int, neuron: int) -> None:
    """The way back, and to the neurons on either side."""
    with st.container(horizontal=True, gap="medium"):
        parts.linked("neurons.py", "← All neurons")
        if neuron > 0:
            parts.linked("neuron.py", f"N{neuron - 1}", neuron=f"L{layer}/N{neuron - 1}")
        if neuron + 1 < run.d_ff:
            parts.linked("neuron.py", f"N{neuron + 1}", neuron=f"L{layer}/N{neuron + 1}")


def page(run: Run) -> None:
    """The neuron that the address names."""
    place = parse(parameter("neuron"), run)
    if place is None:
        parts.linked("neurons.py", "← All neurons")
        parts.title("No such neuron")
        st.info(
            f"This run's neurons are called L0/N0 to L{run.layers - 1}/N{run.d_ff - 1}. Choose one from the list of "
            "all neurons."
        )
        return
    layer, neuron = place
    neighbours(run, layer, neuron)
    parts.title(f"L{layer}/N{neuron}")
    row, densities = ask(run, one_neuron, layer=layer, neuron=neuron)
    facts(run, row)
    with parts.told():
        in_layer(run, row, densities)
    with parts.told():
        in_text(run, layer, neuron)


with parts.told():
    page(shown())
