"""Neuron: one neuron, by an address of its own (L7/N1234): how often, how strongly and on what text it fires."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from twell import analysis
from twell.analysis.neurons.by_neuron import parse_neuron
from twell.analysis.neurons.examples import example_pieces
from twell.analysis.neurons.logit_lens import written
from twell.analysis.neurons.values import known, missing, sampled
from twell.app.jobs.runner import model_of
from twell.app.neurons.neuron_data import one_neuron, ranks
from twell.app.neurons.neuron_figures import rank_curve, value_spread
from twell.app.neurons.neuron_view import examples_html, written_html
from twell.app.ui import widgets
from twell.app.ui.formatting import SPACE, number, percent, plural, rare, token_html, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import current_run, parameter, run_name
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


def facts(run: Run, row: dict[str, object]) -> None:
    """The neuron's numbers, each with what it is of."""
    tokens, fires = int(str(row["tokens"])), int(str(row["fires"]))
    out_of = f"{plural(tokens, 'token')} of {plural(run.manifest.sequences, 'sequence')}"
    density = (
        ("Density", percent(float(str(row["density"]))), f"fires on {whole(fires)} of {out_of}")
        if fires
        else (
            "Density",
            f"<{SPACE}{rare(3 / tokens)}",
            f"never fired in {out_of} (95{SPACE}% bound)",
        )
    )
    never = "it never fired"
    values = (
        density,
        (
            "Rank in its layer",
            whole(float(str(row["rank"]))) if fires else "–",
            f"by density, of {whole(run.d_ff)} neurons" if fires else never,
        ),
        ("Mean value", number(float(str(row["value_mean"]))), "over the tokens that fire it" if fires else never),
        ("Largest value", number(float(str(row["value_max"]))), "in the run" if fires else never),
    )
    widgets.numbers(values)
    if row["one_token"]:
        st.html(
            f'<p class="tw-said">Only one token of the vocabulary fires it: {token_html(str(row["token_text"]))}</p>'
        )
    if fires and run.has("activity"):
        widgets.page_link("text", "The first sequence that fires it →", sequence=row["first_sequence"])


def in_layer(run: Run, row: dict[str, object]) -> None:
    """Where the neuron stands among those of its layer."""
    layer = int(str(row["layer"]))
    result = query(run, ranks, layer=layer)
    densities = result.frame["density"].to_numpy()
    dead = int((densities == 0).sum())
    said = f"Every neuron of layer {layer}, highest density first; axes logarithmic. {whole(dead)} never fired."
    widgets.heading("In its layer", said, result)
    figure = rank_curve(densities, int(str(row["rank"])), float(str(row["density"])), str(row["label"]))
    widgets.draw(figure, "rank", "Densities of the layer's neurons by rank")


def spread(run: Run, row: dict[str, object]) -> None:
    """How strongly it fires, where it does."""
    layer, neuron = int(str(row["layer"])), int(str(row["neuron"]))
    if not known(run) or not int(str(row["fires"])):
        widgets.heading("Its values")
        raise missing(run) if not known(run) else Missing("It has no values: it never fired in this run.")
    result = query(run, sampled, layer=layer, neuron=neuron)
    values = result.frame
    if values.attrs["source"] == "fired":
        tokens, n = plural(values.attrs["tokens"], "token"), plural(len(values), "firing")
        said = f"{n} among the {tokens} whose activations the run keeps."
    else:
        said = f"A sample: {plural(len(values), 'firing')} drawn at random of {whole(float(str(row['fires'])))}."
    said += " The mean and the largest value are over all firings."
    widgets.heading("Its values", said, result)
    mean, most = float(str(row["value_mean"])), float(str(row["value_max"]))
    widgets.draw(value_spread(values["value"].to_numpy(), mean, most), "values", "How the neuron's values spread")


def writes(run: Run, layer: int, neuron: int) -> None:
    """The tokens whose logits its down row raises and lowers most."""
    title = "What it writes"
    model = model_of(run)
    if model is None or not Path(model[0]).is_dir():
        widgets.heading(title)
        raise Missing(
            "The tokens that this neuron makes more or less likely are computed from the model's weights, which are "
            "not on this machine. They are for the bundled model, and for a model captured from a local folder."
        )
    result = query(run, written, folder=model[0], layer=layer, neuron=neuron)
    frame = result.frame
    sign = (
        " The up branch gives the sign: where it is negative, raised and lowered are swapped."
        if frame.attrs["gated"]
        else ""
    )
    scale = "with the final norm's scale" if frame.attrs["scaled"] else "there is no final norm"
    widgets.heading(
        title,
        f"Its down row through the unembedding, {scale} and before its division by the residual's length; logits "
        f"relative to the mean of {plural(frame.attrs['tokens'], 'token')}. The direct effect alone: later layers "
        f"read the row too.{sign}",
        result,
    )
    st.html(written_html(frame, run_name()))


def in_text(run: Run, layer: int, neuron: int) -> None:
    """The text that fires it, each token shaded by the neuron's value there."""
    if not run.has("examples"):
        widgets.heading("In the text")
        raise missing(run)
    result = query(run, analysis.examples, layer=layer, neuron=neuron)
    try:
        frame = fetch(run, example_pieces, layer=layer, neuron=neuron)
    except Missing:
        widgets.heading("In the text")
        raise
    top, sample = frame[frame["kind"] == "top"], frame[frame["kind"] == "sample"]
    high = float(frame["value"].max())
    said = (
        f"The {plural(len(top), 'greatest value')} of the run, then {plural(len(sample), 'firing')} drawn at random, "
        f"with percentiles among these. Each token is shaded by the neuron's value there, from 0 to "
        f"{number(high)}. A place opens the passage, shaded by this neuron."
    )
    widgets.heading("In the text", said, result)
    for name, part in (("Greatest", top), ("Across its range", sample)):
        if len(part):
            lines = examples_html(part, high, run_name(), f"L{layer}/N{neuron}")
            st.html(f'<h4 class="tw-part">{name}</h4>{lines}')


def neighbours(run: Run, layer: int, neuron: int) -> None:
    """The way back, and to the neurons on either side."""
    with st.container(horizontal=True, gap="medium"):
        widgets.page_link("neurons", "← All neurons")
        if neuron > 0:
            widgets.page_link("neuron", f"L{layer}/N{neuron - 1}", neuron=f"L{layer}/N{neuron - 1}")
        if neuron + 1 < run.d_ff:
            widgets.page_link("neuron", f"L{layer}/N{neuron + 1}", neuron=f"L{layer}/N{neuron + 1}")


def page(run: Run) -> None:
    """The neuron that the address names."""
    place = parse_neuron(parameter("neuron"), run)
    if place is None:
        widgets.page_link("neurons", "← All neurons")
        widgets.title("No such neuron")
        st.info(
            f"This run's neurons are called L0/N0 to L{run.layers - 1}/N{run.d_ff - 1}. Choose one from the list of "
            "all neurons."
        )
        return
    layer, neuron = place
    neighbours(run, layer, neuron)
    widgets.title(f"L{layer}/N{neuron}")
    row = fetch(run, one_neuron, layer=layer, neuron=neuron)
    facts(run, row)
    with st.container(key="pair"):
        left, right = st.columns(2, gap="large")
    with left, widgets.show_errors():
        in_layer(run, row)
    with right, widgets.show_errors():
        spread(run, row)
    with widgets.show_errors():
        writes(run, layer, neuron)
    with widgets.show_errors():
        in_text(run, layer, neuron)


with widgets.show_errors():
    page(current_run())
