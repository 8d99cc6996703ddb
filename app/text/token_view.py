"""One token of a passage: the neurons that it fires, what the run knows of each, what each writes, and where in the
passage it fires.

While the pointer or the keyboard focus is on a neuron, the passage above is shaded by it. That needs no script: the
values of the neurons shown are written as CSS rules, which a row switches on.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

import numpy as np
import pandas as pd
import streamlit as st

from twell.analysis.neurons.at_token import ORDERS, along, beside, first_of_layers, neurons_at, ordered
from twell.analysis.neurons.logit_lens import promoted
from twell.app.jobs.runner import weights_folder
from twell.app.text.passage_view import fullest, opacity
from twell.app.ui import widgets
from twell.app.ui.formatting import SPACE, number, percent, plural, token_html, visible
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import link, one_of, url_param
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

SHOWN = 24  # neurons of all layers, or of one
SHOWN_BY_LAYER = 40  # about as many where every layer shows its own
LEVELS = 6  # of shade
NEURONS = "its-neurons"  # the place of the neurons in the page
ALL_LAYERS = "all layers"
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MarkedToken:
    """The token whose neurons are drawn.

    Attributes:
        source: the run that keeps its firings: the one shown, or one of the passage alone.
        sequence: the passage's number in that run.
        row: the token's row of `passage`.
        name: the token by itself.
        begin, end: the positions of the passage that are drawn, the last one excluded.
        parameters: the query parameters with which a link shades this passage by a neuron.
        action: a sentence on how the firings came about; empty if they are those of the run shown.
    """

    source: Run
    sequence: int
    row: pd.Series
    name: str
    begin: int
    end: int
    parameters: dict[str, str]
    action: str


def draw_way_to_neurons(
    rows: pd.DataFrame, names: list[str], marked: int | None, parameters: dict[str, object]
) -> None:
    """Draw how many neurons the marked token fires, and a link to them, which stand below the passage; without one, of
    the token that fires most, a link that marks it. Where nothing fires, a line says so.

    Args:
        rows: the rows of the passage that are drawn.
        names: each token by itself.
        marked: the index of the marked row, or None.
        parameters: query parameters with which a token links to itself in the passage.
    """
    index = fullest(rows) if marked is None else marked
    position, nnz = int(rows["position"].iloc[index]), int(rows["nnz"].iloc[index])
    if not nnz:
        of_one = f"{token_html(names[index])} at position {position} fires no neuron."
        st.html(f'<p class="tw-said">{of_one if marked is not None else "None of these tokens fires a neuron."}</p>')
        return
    to = "which ones ↓", f"#{NEURONS}"
    if marked is None:
        to = "which ones →", link("text", **{**parameters, "position": position})
    most = "" if marked is not None else ", the most here"
    st.html(
        f'<p class="tw-said">{token_html(names[index])} at position {position} fires {plural(nnz, "neuron")}{most}: '
        f'<a class="plain tw-chip" href="{to[1]}">{to[0]}</a></p>'
    )


def draw_token(token: MarkedToken, reference: Run, scale_name: str) -> None:
    """Draw the neurons that a token fires.

    Args:
        token: the token.
        reference: the run that densities and largest values are of.
        scale_name: the name of that run.
    """
    position, source = int(token.row["position"]), token.source
    heading_area = st.container()
    layers = [ALL_LAYERS, *(f"L{layer}" for layer in range(source.layers))]
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        order = st.segmented_control(
            "Order by",
            list(ORDERS),
            format_func=lambda key: ORDERS[key],
            required=True,
            **url_param("order", "layer", one_of(ORDERS)),
        )
        param = url_param("layer", ALL_LAYERS, one_of(layers))
        layer = str(st.selectbox("Layer", layers, width=150, **param))
        widgets.page_link("token", "This token in the whole run →", token=int(token.row["token_id"]))
    result = query(source, neurons_at, sequence=token.sequence, position=position).then(beside, reference)
    result = result.then(ordered, str(order or "layer"), None if layer == ALL_LAYERS else int(layer[1:]))
    frame = result.frame
    by_layer = order in (None, "layer") and layer == ALL_LAYERS
    shown = first_of_layers(frame, max(1, SHOWN_BY_LAYER // source.layers)) if by_layer else frame.head(SHOWN)
    limit = f", {'the strongest of each layer' if by_layer else len(shown)} shown" if len(frame) > len(shown) else ""
    caption = (
        f"{plural(len(frame), 'neuron')}{'' if layer == ALL_LAYERS else f' of layer {layer[1:]}'}{limit}. A bar: the "
        f"value, of the neuron's largest in {scale_name}. Density: the share of its tokens that fire the neuron. "
        "Writes: the tokens that its product, if positive, makes likelier. Point at a neuron to shade the passage by "
        f"it. {token.action}"
    )
    with heading_area:
        name = f"Neurons that {visible(token.name)} fires at position {position}"
        st.html(f'<div id="{NEURONS}"></div>')
        widgets.heading(name, caption.strip(), result, key="token-neurons")
    st.html(neurons_html(shown, _writes(reference, shown), token.parameters) + hover_css(token, shown))


def _pairs(frame: pd.DataFrame) -> Pairs:
    """Return layer and index of each row's neuron."""
    return tuple(zip(frame["layer"].tolist(), frame["neuron"].tolist(), strict=True))


def _writes(run: Run, frame: pd.DataFrame) -> dict[tuple[int, int], str]:
    """Return the tokens that each neuron writes, as HTML by layer and index; empty without the weights."""
    if not (folder := weights_folder(run)):
        return {}
    try:
        table = fetch(run, promoted, folder=folder, neurons=_pairs(frame))
    except Missing:
        return {}
    by_neuron = table.groupby(["layer", "neuron"])["text"]
    return {key: " ".join(map(token_html, texts)) for key, texts in by_neuron}


def neurons_html(
    frame: pd.DataFrame, writes: dict[tuple[int, int], str] | None = None, parameters: dict[str, str] | None = None
) -> str:
    """Return rows of `ordered` as HTML, each a link to the neuron's page.

    Args:
        frame: the rows; those of `first_of_layers` are told apart by layer.
        writes: what each neuron writes, as HTML.
        parameters: query parameters with which the passage is shaded by the neuron; None for no such links.
    """
    writes = writes or {}
    kinds = "tw-neuron names" + (" writing" if writes else "")
    lines = [f'<div class="tw-neurons"><div class="tw-row"><div class="{kinds}"><span>neuron</span><span></span>']
    lines.append("<span>of its largest value</span><span>value</span><span>density</span>")
    lines.append(f"{'<span>writes</span>' if writes else ''}</div></div>")
    layer = None
    for index, row in enumerate(frame.itertuples()):
        if "of_layer" in frame and row.layer != layer:
            layer = row.layer
            lines.append(f'<h3 class="tw-part">Layer {layer}: {plural(row.of_layer, "neuron")}</h3>')
        cells = _cells(row) + (
            f'<span class="writes">{writes.get((row.layer, row.neuron), "")}</span>' if writes else ""
        )
        kinds = "tw-neuron writing" if writes else "tw-neuron"
        shade = ""
        if parameters is not None:
            address = link("text", **parameters | {"neuron": row.label})
            shade = f'<a class="tw-shade" href="{address}" aria-label="Shade the passage by {row.label}">shade</a>'
        lines.append(
            f'<div class="tw-row"><a class="{kinds}" data-n="{index}" href="{link("neuron", neuron=row.label)}">{cells}'
            f"</a>{shade}</div>"
        )
    return "".join([*lines, "</div>"])


def _cells(row: object) -> str:
    """Return the cells of a row of `beside`: name, bar, share of the largest value, value, density."""
    share, density = getattr(row, "share"), getattr(row, "density")  # noqa: B009
    text = "–"
    if not np.isnan(share):
        text = percent(min(share, 1.0)) if share <= 1.005 else f"{number(share, 2)}{SPACE}× as large"
    width = 0.0 if np.isnan(share) else 100 * min(float(share), 1)
    often = "–" if np.isnan(density) else percent(float(density)) if density else "dead"
    return (
        f'<span class="name">{getattr(row, "label")}</span><i><b style="width:{width:.0f}%"></b></i>'  # noqa: B009
        f'<span>{html.escape(text)}</span><span class="number">{number(float(getattr(row, "value")))}</span>'  # noqa: B009
        f'<span class="number">{often}</span>'
    )


def hover_css(token: MarkedToken, frame: pd.DataFrame) -> str:
    """Return the CSS that shades the passage by the neuron under the pointer, from 0 to the neuron's largest value.

    Args:
        token: the token whose neurons are drawn.
        frame: the rows of `ordered` that are shown.
    """
    try:
        values = fetch(token.source, along, sequence=token.sequence, neurons=_pairs(frame))
    except Missing:
        return ""
    values = values[values["position"].between(token.begin, token.end - 1)]
    focus = ":is(:hover,:focus-visible)"
    rules = [f"body:has(.tw-neuron[data-n]{focus}) .tw-passage>a{{background:none!important}}"]
    by_neuron = dict(list(values.groupby(["layer", "neuron"])))
    for index, row in enumerate(frame.itertuples()):
        rows = by_neuron.get((row.layer, row.neuron))
        if rows is None:
            continue
        high = row.value / row.share if row.share > 0 else float(rows["value"].max())
        level = np.ceil(np.clip(rows["value"] / max(high, 1e-9), 0, 1) * LEVELS).astype(int)
        for step, places in (rows["position"] - token.begin + 1).groupby(level):
            tokens = ",".join(f":nth-child({place})" for place in places)
            color = f"rgba(47,126,216,{opacity(max(step, 1) / LEVELS):.2f})"
            shaded = f'body:has(.tw-neuron[data-n="{index}"]{focus}) .tw-passage>a:is({tokens})'
            rules.append(f"{shaded}{{background:{color}!important}}")
    return f"<style>{''.join(rules)}</style>"
