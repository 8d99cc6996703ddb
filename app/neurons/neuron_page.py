"""Page Neuron: how often, how strongly and on what text one neuron, such as L7/N1234, fires."""

from __future__ import annotations

from contextlib import suppress

import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.figures.neurons import rank_curve, ranks, value_bars, value_distribution
from twell.analysis.neurons.by_neuron import last_neuron, parse_neuron
from twell.analysis.neurons.coactivation import fires_with
from twell.analysis.neurons.examples import example_pieces
from twell.analysis.neurons.logit_lens import SURE, answers_to, written
from twell.analysis.neurons.values import known, missing, sampled
from twell.app.jobs.runner import model_of, weights_folder
from twell.app.neurons.neuron_data import one_neuron
from twell.app.neurons.neuron_view import examples_html, neighbours_html, written_html
from twell.app.ui import widgets
from twell.app.ui.formatting import SPACE, dead_limit, number, percent, plural, token_html, whole
from twell.app.ui.query import QueryResult, fetch, query
from twell.app.ui.url_state import current_run, parameter, run_name
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

WHERE = "Where it fires in the text"
WRITTEN = 5  # tokens under the numbers


def draw_numbers(run: Run, row: dict[str, object]) -> None:
    """Draw the neuron's numbers, each with a line on what it is.

    Args:
        run: the run.
        row: the neuron's row, from `one_neuron`.
    """
    tokens, fires = int(str(row["tokens"])), int(str(row["fires"]))
    out_of = f"{plural(tokens, 'token')} of {plural(run.manifest.sequences, 'sequence')}"
    density = (
        ("Density", percent(float(str(row["density"]))), f"fires on {whole(fires)} of {out_of}")
        if fires
        else (
            "Density",
            percent(0),
            f"dead: never fired on this text, {out_of}; it fires {dead_limit(run, tokens)}",
        )
    )
    never = "it is dead: it never fired on this text"
    values = (
        density,
        (
            "Rank in its layer",
            whole(float(str(row["rank"]))) if fires else "–",
            f"by density, of {whole(run.widths[int(str(row['layer']))])} neurons" if fires else never,
        ),
        ("Mean value", number(float(str(row["value_mean"]))), "over the tokens that fire it" if fires else never),
        ("Largest value", number(float(str(row["value_max"]))), "in the run" if fires else never),
    )
    widgets.numbers(values)
    if row["one_token"]:
        st.html(
            f'<p class="tw-said">It fires on one token of the vocabulary only: {token_html(str(row["token_text"]))}</p>'
        )
    if fires and run.has("activity"):
        label = "The first passage in which it fires, shaded by it →"
        widgets.page_link("text", label, sequence=row["first_sequence"], neuron=row["label"])


def read_off(frame: pd.DataFrame) -> str:
    """Return how the tokens were found, which tells what they leave out. frame: rows of `written`"""
    norm = "the final norm and the output head" if frame.attrs["scaled"] else "the output head"
    return f"Read off its weights through {norm}, without the layers between"


def makes_likelier(frame: pd.DataFrame) -> str:
    """Return where the neuron makes the tokens that it raises likelier, and where less likely. frame: of `written`"""
    if not frame.attrs["signed"]:
        return "Where it fires, it makes these likelier"
    return "Where it fires and its up branch is positive, it makes these likelier, where that is negative less likely"


def draw_first_written(run: Run, layer: int, neuron: int) -> None:
    """Draw in a line which tokens the neuron makes likeliest; nothing where the model's weights are not here."""
    if not (folder := weights_folder(run)):
        return  # the figure below says why
    with suppress(Missing):
        frame = fetch(run, written, folder=folder, layer=layer, neuron=neuron)
        texts = frame.loc[frame["kind"] == "raised", "text"].head(WRITTEN)
        st.html(
            f'<p class="tw-said">{makes_likelier(frame)}: {" ".join(map(token_html, texts))} '
            f'<span class="tw-note">{read_off(frame)}.</span></p>'
        )


def draw_rank(run: Run, row: dict[str, object]) -> None:
    """Draw the neuron's rank by density in its layer. `row` is its row, from `one_neuron`."""
    layer = int(str(row["layer"]))
    result = query(run, ranks, layer=layer)
    densities = result.frame["density"].to_numpy()
    dead = int((densities == 0).sum())
    caption = (
        f"The density of every neuron of layer {layer}, highest first; axes logarithmic. {whole(dead)} are dead "
        "(never fired on this text) and are not drawn."
    )
    widgets.heading("Rank in its layer", caption, result)
    figure = rank_curve(densities, int(str(row["rank"])), float(str(row["density"])), str(row["label"]))
    widgets.draw(figure, "rank", "Densities of the layer's neurons by rank")


def draw_values(run: Run, row: dict[str, object]) -> None:
    """Draw the distribution of the neuron's values above 0. `row` is its row, from `one_neuron`."""
    title = "Values when it fires"
    layer, neuron = int(str(row["layer"])), int(str(row["neuron"]))
    mean, largest = (float(value) for value in pd.Series(row)[["value_mean", "value_max"]])
    if int(str(row["fires"])) and (counted := histogram_of(run, layer, neuron)) is not None:
        caption = f"All {plural(int(str(row['fires'])), 'firing')}, by value; two bars to a doubling."
        widgets.heading(title, caption, counted)
        widgets.draw(value_bars(counted.frame, mean, largest), "values", "How often the neuron fires with which value")
        return
    if not known(run) or not int(str(row["fires"])):
        widgets.heading(title)
        raise (
            missing(run)
            if not known(run)
            else Missing("The neuron is dead: it never fired on this text, so it has no values.")
        )
    result = query(run, sampled, layer=layer, neuron=neuron)
    values = result.frame
    if values.attrs["source"] == "fired":
        tokens, n = plural(values.attrs["tokens"], "token"), plural(len(values), "firing")
        source = f"{n} among the {tokens} whose activations the run keeps."
    else:
        source = f"A random sample: {plural(len(values), 'firing')} of {whole(float(str(row['fires'])))}."
    widgets.heading(title, f"{source} The mean and the largest value are over all firings.", result)
    figure = value_distribution(values["value"].to_numpy(), mean, largest)
    widgets.draw(figure, "values", "Distribution of the neuron's values")


def histogram_of(run: Run, layer: int, neuron: int) -> QueryResult | None:
    """Return the neuron's `neuron_histogram`; None where the run does not count values."""
    try:
        return query(run, analysis.neuron_histogram, layer=layer, neuron=neuron)
    except Missing:
        return None


def draw_logits(run: Run, layer: int, neuron: int) -> None:
    """Draw the tokens whose logits the neuron's row of the down projection raises and lowers most."""
    title = "What it writes"
    if not (folder := weights_folder(run)):
        widgets.heading(title)
        raise Missing(
            "The tokens that this neuron makes more or less likely are computed from the model's weights, which are "
            "not on this machine. This works for the bundled model, and for a model captured from a local folder."
        )
    result = query(run, written, folder=folder, layer=layer, neuron=neuron)
    frame = result.frame
    sign = (
        " The sign is for a positive up branch; if it is negative, raised and lowered swap."
        if frame.attrs["signed"]
        else ""
    )
    widgets.heading(
        title,
        f"{read_off(frame)}. Logits for a product of 1, before the division by the residual's length, relative to the "
        f"mean of {plural(frame.attrs['tokens'], 'token')}.{sign}",
        result,
        key="direct-effect-on-the-logits",
    )
    st.html(written_html(frame, run_name()))


def draw_answers(run: Run, layer: int, neuron: int) -> None:
    """Draw the tokens whose embeddings the neuron's gate row matches best and worst; nothing without the weights."""
    if not (folder := weights_folder(run)):
        return  # what it writes says why
    result = query(run, answers_to, folder=folder, layer=layer, neuron=neuron)
    frame = result.frame
    rule = (
        f"beyond what {100 * SURE:.0f}{SPACE}% of the layer's gate rows, shuffled, reach with any of "
        f"{plural(frame.attrs['tokens'], 'token')}"
    )
    widgets.heading(
        "What it answers to, by its weights",
        (
            "The neuron's gate row times the embedding of each token, relative to their mean: what a token brings "
            "before any layer. It decides in layer 0; in later layers what others have added counts as well, so see "
            f"the text above for what does fire it. Only matches {rule}."
            if len(frame)
            else f"Nothing stands out from noise: no token's embedding matches the neuron's gate row {rule}."
        ),
        result,
        key="answers",
    )
    if len(frame):
        st.html(written_html(frame, run_name(), ("Matched best", "Matched worst")))


def draw_neighbours(run: Run, layer: int, neuron: int) -> None:
    """Draw the neurons that fire on the same tokens."""
    result = query(run, fires_with, layer=layer, neuron=neuron)
    frame = result.frame
    source = (
        "tokens of the sample of firings that fire it; neurons of this layer"
        if frame.attrs["source"] == "fired"
        else "positions of its own examples, most of them strong firings; neurons of all layers"
    )
    caption = f"Where the other one fires too: {source}." if len(frame) else f"No other neuron, by the {source}."
    widgets.heading("Fires with", caption, result)
    st.html(neighbours_html(frame, run_name()))


def draw_examples(run: Run, layer: int, neuron: int) -> None:
    """Draw the text around the neuron's examples, each token shaded by the neuron's value."""
    if not run.has("examples"):
        widgets.heading(WHERE)
        raise missing(run)
    result = query(run, analysis.examples, layer=layer, neuron=neuron)
    try:
        frame = fetch(run, example_pieces, layer=layer, neuron=neuron)
    except Missing:
        widgets.heading(WHERE)
        raise
    top, sample = frame[frame["kind"] == "top"], frame[frame["kind"] == "sample"]
    high = float(frame["value"].max())
    strongest = top.iloc[0] if len(top) else frame.iloc[0]
    largest = f"{plural(len(top), 'largest value')} of the run"
    counted = histogram_of(run, layer, neuron)
    of = "in the sample" if counted is None else "among all its firings"
    spread = "" if counted is None else " spread evenly over its range of values, on a scale of doublings"
    sampled_firings = f"a random sample of {plural(len(sample), 'firing')}{spread}, with percentiles {of}"
    caption = (
        f"The {largest}, then {sampled_firings}. Each token is shaded by the neuron's value there, from 0 to "
        f"{number(high)}. Choose a position to open the passage, shaded by this neuron. +2 alike: the same eight "
        "tokens come twice more, and are shown once."
    )
    widgets.heading(WHERE, caption, result, key="in-the-text")
    if model_of(run) is not None:
        address = {"sequence": int(strongest["sequence"]), "position": int(strongest["position"])}
        widgets.page_link(
            "text", f"What if L{layer}/N{neuron} were zero? →", **address, neuron=f"L{layer}/N{neuron}", zero="True"
        )
    by_value = sample.sort_values("value", ascending=False, kind="stable")
    for name, rows in (("Largest values", top), ("Random sample of firings, over its range of values", by_value)):
        if len(rows):
            lines = examples_html(rows, high, run_name(), f"L{layer}/N{neuron}")
            st.html(f'<h3 class="tw-part">{name}</h3>{lines}')


def draw_links(run: Run, layer: int, neuron: int) -> None:
    """Draw links to the list of neurons, and to the neurons before and after this one."""
    with st.container(horizontal=True, gap="medium"):
        widgets.page_link("neurons", "← All neurons")
        if neuron > 0:
            widgets.page_link("neuron", f"L{layer}/N{neuron - 1}", neuron=f"L{layer}/N{neuron - 1}")
        if neuron + 1 < run.widths[layer]:
            widgets.page_link("neuron", f"L{layer}/N{neuron + 1}", neuron=f"L{layer}/N{neuron + 1}")


def draw_page(run: Run) -> None:
    """Draw the neuron that the address names, or say that there is none."""
    location = parse_neuron(parameter("neuron"), run)
    if location is None:
        widgets.page_link("neurons", "← All neurons")
        widgets.title("No such neuron")
        st.info(f"This run's neurons are named L0/N0 to {last_neuron(run)}. Choose one from the list of all neurons.")
        return
    layer, neuron = location
    draw_links(run, layer, neuron)
    widgets.title(f"L{layer}/N{neuron}: where does it fire, and what does it write?")
    row = fetch(run, one_neuron, layer=layer, neuron=neuron)
    draw_numbers(run, row)
    draw_first_written(run, layer, neuron)
    with widgets.show_errors():
        draw_examples(run, layer, neuron)
    left, right = widgets.pair("pair-weights")
    with left, widgets.show_errors():
        draw_logits(run, layer, neuron)
    with right, widgets.show_errors():
        draw_answers(run, layer, neuron)
    with widgets.show_errors():
        draw_neighbours(run, layer, neuron)
    left, right = widgets.pair("pair")
    with left, widgets.show_errors():
        draw_rank(run, row)
    with right, widgets.show_errors():
        draw_values(run, row)


with widgets.show_errors():
    draw_page(current_run())
