"""Page Neurons: how often the neurons of each layer fire, and lists of the most frequent, rarest and dead ones."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.figures import plots
from twell.analysis.figures.neurons import density_map
from twell.analysis.neurons.by_neuron import parse_neuron
from twell.app.neurons.neuron_data import DENSITIES, KINDS, LIST, MAX_ROWS, NOTES
from twell.app.ui import widgets
from twell.app.ui.formatting import decimals, plural, rare, visible, whole
from twell.app.ui.query import Query, fetch, query
from twell.app.ui.questions import Question, draw_question
from twell.app.ui.url_state import current_run, one_of, open_page, run_name, sync_url, url_param
from twell.workbench.run.store import Run

# Columns of the list after the neuron's name; neurons that never fired have none of them.
COLUMNS_IF_FIRED = ("density", "fires", "value_mean", "value_max", "token_text", "first_sequence")

TOGETHER = Question(
    "Neurons that fire together",
    Query(analysis.firing_clusters),
    plots.clusters,
    "Clusters of neurons of a layer whose firings correlate, a dot each: how many neurons it has, and the mean "
    "correlation of its pairs. Large clusters at the top fire as one: a group that could be kept, moved or skipped as "
    "a whole.",
    reads_firings=True,
)


def draw_densities(run: Run) -> None:
    """Draw the share of each layer's neurons by density."""
    result = query(run, DENSITIES)
    tokens = int(fetch(run, analysis.by_layer)["tokens"].max())
    widgets.heading(
        "Density by layer",
        f"Share of a layer's {whole(run.d_ff)} neurons by density, the share of tokens that fire the neuron. "
        f"Never: not on any of {plural(tokens, 'token')} in {plural(run.manifest.sequences, 'sequence')}, so the "
        f"density is below {rare(3 / max(tokens, 1))} (95 %).",
        result,
    )
    widgets.draw(density_map(result.frame), "densities", "Share of neurons by density in each layer", wide=True)


def go_to(label: str) -> None:
    """Open the page of a neuron, by its name."""
    open_page("neuron", run=run_name(), neuron=label)


def choices(run: Run) -> tuple[str, int | None]:
    """Draw the filters, and a field that opens a neuron by its name; return kind and layer (None for all)."""
    names = ["all layers", *(f"L{layer}" for layer in range(run.layers))]
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        kind = widgets.url_choice("Neurons", KINDS, "kind", LIST.arguments["kind"])
        layer = st.selectbox("Layer", names, width=140, **url_param("layer", names[0], one_of(names)))
        label = st.text_input("Go to", placeholder="L3/N42", width=140, key="go", max_chars=20, on_change=sync_url)
    if label:
        location = parse_neuron(label, run)
        if location is not None:
            go_to(f"L{location[0]}/N{location[1]}")
        widgets.no_such_neuron(run)
    return kind, None if layer == names[0] else int(layer[1:])


def draw_list(run: Run, kind: str, layer: int | None) -> None:
    """Draw the list of neurons of a kind (see `neuron_list`); a click on a row opens the neuron's page."""
    result = query(run, LIST.where(layer=layer, kind=kind))
    frame = result.frame
    count = frame.attrs["count"]
    scope = "in all layers" if layer is None else f"in layer {layer}"
    limit = f" (first {whole(MAX_ROWS)} shown)" if count > MAX_ROWS else ""
    caption = f"{plural(count, 'neuron')} {scope}{limit}. {NOTES[kind]} Choose a row to open the neuron's page."
    widgets.heading(KINDS[kind], caption, result)
    if frame.empty:
        st.info("There are no such neurons here." if kind != "dead" else "Every neuron fired at least once.")
        return
    texts = frame["token_text"].map(lambda text: visible(text) if text else "")
    rows = frame.assign(token_text=texts, density=100 * frame["density"])
    row = widgets.chosen_row(
        rows,
        f"neuron-table-{kind}-{layer}",
        column_order=["label", *(COLUMNS_IF_FIRED if kind != "dead" else ())],
        column_config=columns(rows),
    )
    if row is not None:
        go_to(str(row["label"]))


def columns(frame: pd.DataFrame) -> dict[str, Any]:
    """Return the configuration of the list's columns, with the density in %.

    Numbers have formats of our own, because Streamlit's follow the language of the browser and the page does not.
    """
    column = st.column_config
    return {
        "label": column.TextColumn("neuron"),
        "density": column.ProgressColumn(
            "density, %",
            format=decimals(frame["density"]),
            min_value=0.0,
            max_value=max(float(frame["density"].max()), 1e-9),
            help="share of tokens that fire it",
        ),
        "fires": column.NumberColumn("fires", format="%d", help="tokens that fire it"),
        "value_mean": column.NumberColumn(
            "mean value", format=decimals(frame["value_mean"]), help="mean over the tokens that fire it"
        ),
        "value_max": column.NumberColumn("largest value", format=decimals(frame["value_max"])),
        "token_text": column.TextColumn("one token", help="the token that fires it, if it is the only one"),
        "first_sequence": column.NumberColumn("first sequence", format="%d", help="sequence in which it first fired"),
    }


def draw_page(run: Run) -> None:
    """Draw the map of densities, the filters and the list."""
    st.query_params.pop("neuron", None)  # the link back from a neuron's page may leave it in the address
    draw_densities(run)
    kind, layer = choices(run)
    draw_list(run, kind, layer)
    draw_question(run, TOGETHER)


widgets.title("How often does each neuron fire?")
with widgets.show_errors():
    draw_page(current_run())
