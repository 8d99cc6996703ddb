"""One token of a passage: the neurons that it fires, with what the run knows of each."""

from __future__ import annotations

import html

import numpy as np
import pandas as pd
import streamlit as st

from twell.analysis.neurons.at_token import ORDERS, beside, neurons_at, ordered
from twell.app.ui import widgets
from twell.app.ui.formatting import SPACE, number, percent, plural, visible
from twell.app.ui.query import query
from twell.app.ui.url_state import link, one_of, url_param
from twell.workbench.run.store import Run

SHOWN = 24  # neurons
ALL_LAYERS = "all layers"


def draw_token(
    source: Run, sequence: int, row: pd.Series, name: str, reference: Run, scale_name: str, action: str
) -> None:
    """Draw the neurons that a token fires.

    Args:
        source: the run that keeps its firings: the one shown, or one of the passage alone.
        sequence: the passage's number in that run.
        row: the token's row of `passage`.
        name: the token by itself.
        reference: the run that densities and largest values are of.
        scale_name: the name of that run.
        action: a sentence on how the firings came about; empty if they are those of the run shown.
    """
    position = int(row["position"])
    heading_area = st.container()
    layers = [ALL_LAYERS, *(f"L{layer}" for layer in range(source.layers))]
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        order = st.segmented_control(
            "Order by",
            list(ORDERS),
            format_func=lambda key: ORDERS[key],
            required=True,
            **url_param("order", "value", one_of(ORDERS)),
        )
        param = url_param("layer", ALL_LAYERS, one_of(layers))
        layer = str(st.selectbox("Layer", layers, width=150, **param))
        widgets.page_link("token", "This token in the whole run →", token=int(row["token_id"]))
    result = query(source, neurons_at, sequence=sequence, position=position).then(beside, reference)
    result = result.then(ordered, str(order or "value"), None if layer == ALL_LAYERS else int(layer[1:]))
    frame = result.frame
    limit = f", {SHOWN} shown" if len(frame) > SHOWN else ""
    caption = (
        f"{plural(len(frame), 'neuron')}{'' if layer == ALL_LAYERS else f' of layer {layer[1:]}'}{limit}. A bar: the "
        f"value, of the neuron's largest in {scale_name}. Density: the share of its tokens that fire the neuron. "
        f"{action}"
    )
    with heading_area:
        widgets.heading(f"Neurons that {visible(name)} fires at {position}", caption.strip(), result)
    st.html(neurons_html(frame.head(SHOWN)))


def neurons_html(frame: pd.DataFrame) -> str:
    """Return rows of `ordered` as HTML, each a link to the neuron's page."""
    lines = ['<div class="tw-neurons"><div class="tw-neuron names"><span>neuron</span><span></span>']
    lines.append("<span>of its largest value</span><span>value</span><span>density</span></div>")
    for row in frame.itertuples():
        share = 0.0 if np.isnan(row.share) else float(row.share)
        text = (
            "–"
            if np.isnan(row.share)
            else percent(min(share, 1.0))
            if share <= 1.005
            else f"{number(share, 2)}{SPACE}× as large"
        )
        density = "–" if np.isnan(row.density) else percent(float(row.density)) if row.density else "never"
        lines.append(
            f'<a class="tw-neuron" href="{link("neuron", neuron=row.label)}"><span class="name">{row.label}</span>'
            f'<i><b style="width:{100 * min(share, 1):.0f}%"></b></i><span>{html.escape(text)}</span>'
            f'<span class="number">{number(float(row.value))}</span><span class="number">{density}</span></a>'
        )
    return "".join([*lines, "</div>"])
