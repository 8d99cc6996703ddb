"""Neurons: how often the neurons of each layer fire, which are hot, which are rare, and which never fire."""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.neurons.by_neuron import parse_neuron
from twell.app.neurons.neuron_data import DENSITIES, KINDS, LIST, LISTED, NOTES
from twell.app.neurons.neuron_figures import density_map
from twell.app.ui import widgets
from twell.app.ui.formatting import decimals, plural, rare, visible, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import current_run, one_of, open_page, run_name, sync_url, url_param
from twell.workbench.run.store import Run

# What is shown of a neuron beside its name; of one that never fired there is nothing to show.
FIRED = ("density", "fires", "value_mean", "value_max", "token_text", "first_sequence")


def densities(run: Run) -> None:
    """The map of densities."""
    result = query(run, DENSITIES)
    tokens = int(fetch(run, analysis.by_layer)["tokens"].max())
    widgets.heading(
        "Density by layer",
        f"Share of a layer's {whole(run.d_ff)} neurons by the share of {plural(tokens, 'token')} that fire them. "
        f"Never: not on any of these tokens, of {plural(run.manifest.sequences, 'sequence')}, so the neuron's density "
        f"is below {rare(3 / max(tokens, 1))} (95 %).",
        result,
    )
    widgets.draw(density_map(result.frame), "densities", "Share of neurons by density in each layer", wide=True)


def go_to(label: str) -> None:
    """Open a neuron's page."""
    open_page("neuron", run=run_name(), neuron=label)


def choices(run: Run) -> tuple[str, int | None]:
    """Kind and layer, carried by the address, and a field that leads to a neuron by its name."""
    names = ["all layers", *(f"L{layer}" for layer in range(run.layers))]
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        kind = st.segmented_control(
            "Neurons",
            list(KINDS),
            format_func=lambda k: KINDS[k],
            required=True,
            **url_param("kind", LIST.arguments["kind"], one_of(KINDS)),
        )
        which = st.selectbox("Layer", names, width=140, **url_param("layer", names[0], one_of(names)))
        wanted = st.text_input("Go to", placeholder="L3/N42", width=140, key="go", max_chars=20, on_change=sync_url)
    if wanted:
        place = parse_neuron(wanted, run)
        if place is not None:
            go_to(f"L{place[0]}/N{place[1]}")
        widgets.no_such_neuron(run)
    return str(kind), None if which == names[0] else int(which[1:])


def table(run: Run, kind: str, layer: int | None) -> None:
    """The neurons chosen; a click on a row opens the neuron's page."""
    result = query(run, LIST.where(layer=layer, kind=kind))
    frame = result.frame
    count = frame.attrs["count"]
    where = "of all layers" if layer is None else f"of layer {layer}"
    cut = f", the first {whole(LISTED)} shown" if count > LISTED else ""
    said = f"{plural(count, 'neuron')} {where}{cut}. {NOTES[kind]} Choose a row to open the neuron's page."
    widgets.heading(KINDS[kind], said, result)
    if frame.empty:
        st.info("There is no such neuron here." if kind != "dead" else "Every neuron fired at least once.")
        return
    texts = frame["token_text"].map(lambda text: visible(text) if text else "")
    rows = frame.assign(token_text=texts, density=100 * frame["density"])
    event = st.dataframe(
        rows,
        hide_index=True,
        height=420,
        on_select=sync_url,
        selection_mode="single-row",
        key=f"neuron-table-{kind}-{layer}",
        column_order=["label", *(FIRED if kind != "dead" else ())],
        column_config=columns(rows),
    )
    if event.selection.rows:
        go_to(str(rows.iloc[event.selection.rows[0]]["label"]))


def columns(frame: pd.DataFrame) -> dict[str, Any]:
    """The columns of the table, density in %. Numbers have a form of their own, as Streamlit's for thousands and shares
    go by the language of the browser, and sentences do not."""
    column = st.column_config
    return {
        "label": column.TextColumn("neuron"),
        "density": column.ProgressColumn(
            "density, %",
            format=decimals(frame["density"]),
            min_value=0.0,
            max_value=max(float(frame["density"].max()), 1e-9),
            help="share of the tokens that fire it",
        ),
        "fires": column.NumberColumn("fires", format="%d", help="tokens that fire it"),
        "value_mean": column.NumberColumn(
            "mean value", format=decimals(frame["value_mean"]), help="mean over the tokens that fire it"
        ),
        "value_max": column.NumberColumn("largest value", format=decimals(frame["value_max"])),
        "token_text": column.TextColumn("one token", help="the token that fires it, if it is the only one"),
        "first_sequence": column.NumberColumn("first sequence", format="%d", help="sequence in which it first fired"),
    }


def page(run: Run) -> None:
    """The map, then the list."""
    st.query_params.pop("neuron", None)
    densities(run)
    kind, layer = choices(run)
    table(run, kind, layer)


widgets.title("How often does each neuron fire?")
with widgets.show_errors():
    page(current_run())
