"""Page Overview: the run's headline numbers, a figure of its layers, what stands out, and what was run."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import streamlit as st

from twell import analysis
from twell.analysis.figures.overview import BLOCKS, comparable_speedup, layer_by_layer, layer_rows
from twell.app.activity.highlights import highlights
from twell.app.ui import widgets
from twell.app.ui.formatting import SPACE, number, percent, plural, rare, times, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import current_run
from twell.workbench.run.store import Run


def draw_headline(run: Run) -> None:
    """Draw the headline numbers of `analysis.overview`, each with a line on what it is computed from."""
    numbers = fetch(run, analysis.overview)
    tokens = numbers["tokens"]
    if tokens is None:
        st.info(widgets.escape_markdown(numbers["missing"]["tokens"]))
        return
    neurons = run.layers * run.d_ff
    if numbers["dead"] is None:
        dead = (
            "one of their files cannot be read: see page Neurons"
            if run.has("neurons")
            else "not recorded: capture with --probes neurons"
        )
    else:
        dead = (
            f"{whole(numbers['dead'])} of {whole(neurons)} never fired in {whole(tokens)} tokens of "
            f"{plural(run.manifest.sequences, 'sequence')}: each fires on less than "
            f"{rare(numbers['dead_upper'])} of tokens (95{SPACE}%)"
        )
    loss = f"over {plural(numbers['loss_tokens'], 'prediction')}" if numbers["loss_tokens"] else "not recorded"
    if numbers["speedup"] is None:
        speed = "none is claimed from the slow reference kernel" if numbers["kernel"] else "not timed"
    else:
        speed = ffn_speedup_note(numbers)
    values = (
        ("Sparsity", percent(numbers["sparsity"]), f"1 − nnz / d_ff, mean of {plural(run.layers, 'layer')}"),
        (
            "nnz per token and layer",
            number(numbers["nnz_mean"]),
            f"of {whole(run.d_ff)} neurons, {plural(tokens, 'token')}",
        ),
        ("Next-token loss", f"{number(numbers['loss'])} nats" if numbers["loss"] is not None else "–", loss),
        ("Dead neurons", percent(numbers["dead_share"]), dead),
        ("FFN speedup", times(numbers["speedup"]), speed),
    )
    widgets.numbers(values)


def ffn_speedup_note(numbers: dict[str, Any]) -> str:
    """Return what stands under the FFN speedup: layers, interval, kernel, and what to mind (`analysis.overview`)."""
    span = (
        f"95{SPACE}% {times(numbers['speedup_low'])} to {times(numbers['speedup_high'])}, "
        if numbers["speedup_turns"] > 1
        else ""
    )
    text = f"dense time / sparse time, {numbers['speedup_layers']}, {span}{numbers['kernel']} kernel"
    return ". ".join([text, *(sentence.rstrip(".") for sentence in numbers["speedup_caveats"])])


def draw_layers(run: Run) -> None:
    """Draw the figure with a row a layer: mean nnz by position, nnz of a token, dead neurons, FFN speedup."""
    blocks, by_layer = fetch(run, analysis.position_blocks, blocks=BLOCKS), fetch(run, analysis.by_layer)
    speedup = fetch(run, comparable_speedup)
    tokens = blocks.groupby("layer")["tokens"].sum().max()
    first = ", position 0 included" if (blocks["position_from"] == 0).any() else ""
    caption = f"{plural(tokens, 'token')}, the same in every layer{first}. Shades are logarithmic."
    widgets.heading("Layer by layer", caption, query(run, layer_rows))
    alt = "By layer: mean nnz by position, nnz of a token, neurons that never fired, FFN speedup"
    widgets.draw(layer_by_layer(blocks, by_layer, speedup), "layer-by-layer", alt, wide=True)


def draw_highlights(run: Run) -> None:
    """Draw the sentences of `highlights`, a column a page, under a link to the page."""
    widgets.heading("Worth a look")
    by_page = [(page, list(group)) for page, group in groupby(highlights(run), key=lambda highlight: highlight.page)]
    if not by_page:
        return
    with st.container(key="cards"):
        columns = st.columns(len(by_page), gap="large")
    for column, (page, group) in zip(columns, by_page, strict=True):
        with column:
            widgets.page_link(page, f"{page.capitalize()} →")
            st.html("".join(f'<p class="tw-said">{highlight.sentence}</p>' for highlight in group))


def draw_manifest(run: Run) -> None:
    """Draw the facts of the run's manifest, folded up."""
    m = run.manifest
    text = [
        f"{t.get('source', '?')} ({', '.join(plural(t[k], k[:-1]) for k in ('documents', 'tokens') if t.get(k))})"
        for t in m.text
    ]
    size = [plural(m.model["parameters"], "parameter")] if m.model.get("parameters") else []
    facts = {
        "Model": ", ".join([str(m.model[k]) for k in ("name", "revision", "family") if m.model.get(k)] + size),
        "Text": "; ".join(text) or "–",
        "Device": ", ".join(word for word in (m.device, m.driver, m.dtype) if word),
        "Kernel": f"{m.kernel['name']}: {m.kernel.get('reason', '')}",
        "TwELL": f"tile {m.layout['tile']}, compression {m.layout['compression']}, {m.layout['slots']} slots a tile",
        "nnz": m.nnz_definition,
        "Recorded": f"{m.created[:16].replace('T', ' ')} UTC, in {number(m.seconds)} s",
        "Versions": ", ".join(f"{k} {v}" for k, v in m.versions.items()) or "–",
        "Parity": measurements(m.parity)
        or "not verified: twell verify compares outputs and counts with the dense model",
        "Overhead": measurements(m.overhead) or "not measured: twell verify measures the cost of counting",
    }
    with st.expander("What was run"):
        st.html(widgets.facts_html(facts))


def measurements(values: dict[str, Any] | None) -> str:
    """Return what `twell verify` measured as a list of names and values; empty if it did not."""
    texts = {
        name: number(value) if isinstance(value, float) else whole(value) if isinstance(value, int) else value
        for name, value in (values or {}).items()
    }
    return ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in texts.items())


def draw_page(run: Run) -> None:
    """Draw the whole page."""
    draw_headline(run)
    with widgets.show_errors():
        draw_layers(run)
    with widgets.show_errors():
        draw_highlights(run)
    draw_manifest(run)


with widgets.show_errors():
    draw_page(current_run())
