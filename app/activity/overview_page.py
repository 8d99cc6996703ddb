"""Overview: what was run on what, how sparse it is, and what is worth a look."""

from __future__ import annotations

import html
from itertools import groupby
from typing import Any

import streamlit as st

from twell import analysis
from twell.app.activity.highlights import findings
from twell.app.activity.overview_data import BLOCKS, fair_speedup, layer_rows
from twell.app.activity.overview_figures import layer_by_layer
from twell.app.ui import widgets
from twell.app.ui.formatting import SPACE, number, percent, plural, rare, times, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import current_run
from twell.workbench.run.store import Run


def headline(run: Run) -> None:
    """The numbers that a run is known by, each with what it is of."""
    found = fetch(run, analysis.overview)
    tokens, missing = found["tokens"], found["missing"]
    if tokens is None:
        st.info(widgets.escape_markdown(missing["tokens"]))
        return
    neurons = run.layers * run.d_ff
    if found["dead"] is None:
        dead = (
            "one of their parts cannot be read: see Neurons"
            if run.has("neurons")
            else "not recorded: capture with --probes neurons"
        )
    else:
        dead = (
            f"{whole(found['dead'])} of {whole(neurons)} never fired in {whole(tokens)} tokens of "
            f"{plural(run.manifest.sequences, 'sequence')}: density under "
            f"{rare(found['dead_upper'])} (95{SPACE}%)"
        )
    loss = f"over {plural(found['loss_tokens'], 'prediction')}" if found["loss_tokens"] else "not recorded"
    if found["speedup"] is None:
        speed = "no speedup is claimed from the slow reference kernel" if found["kernel"] else "not timed"
    else:
        speed = (
            f"dense time / sparse time of all layers' FFN, {found['kernel']} kernel, "
            f"{found['speedup_repeats']} batch{'es' if found['speedup_repeats'] != 1 else ''}"
        )
    values = (
        ("Sparsity", percent(found["sparsity"]), f"1 − nnz / d_ff, mean of {plural(run.layers, 'layer')}"),
        (
            "nnz per token and layer",
            number(found["nnz_mean"]),
            f"of {whole(run.d_ff)} neurons, {plural(tokens, 'token')}",
        ),
        ("Next-token loss", f"{number(found['loss'])} nats" if found["loss"] is not None else "–", loss),
        ("Dead neurons", percent(found["dead_share"]), dead),
        ("FFN speedup", times(found["speedup"]), speed),
    )
    widgets.numbers(values)


def layers(run: Run) -> None:
    """A row a layer: where in the sequence it fires, how much, what never does, and what that buys."""
    blocks, by_layer = fetch(run, analysis.position_blocks, blocks=BLOCKS), fetch(run, analysis.by_layer)
    speedup = fetch(run, fair_speedup)
    tokens = blocks.groupby("layer")["tokens"].sum().max()
    first = ", position 0 included" if (blocks["position_from"] == 0).any() else ""
    said = f"{plural(tokens, 'token')} in each layer{first}. The map's shades are logarithmic."
    widgets.heading("Layer by layer", said, query(run, layer_rows))
    alt = "By layer: mean nnz by position, nnz of a token, neurons that never fired, FFN speedup"
    widgets.draw(layer_by_layer(blocks, by_layer, speedup), "layer-by-layer", alt, wide=True)


def worth_a_look(run: Run) -> None:
    """A sentence for each thing that stands out, under a link to the page that shows it."""
    widgets.heading("Worth a look")
    found = [(page, list(group)) for page, group in groupby(findings(run), key=lambda finding: finding.page)]
    if not found:
        return
    with st.container(key="cards"):
        columns = st.columns(len(found), gap="large")
    for column, (page, group) in zip(columns, found, strict=True):
        with column:
            widgets.page_link(page, f"{page.capitalize()} →")
            st.html("".join(f'<p class="tw-said">{finding.sentence}</p>' for finding in group))


def what_was_run(run: Run) -> None:
    """The manifest, for people."""
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
        "Parity": measured(m.parity) or "not verified: twell verify compares outputs and counts with the dense model",
        "Overhead": measured(m.overhead) or "not measured: twell verify does",
    }
    with st.expander("What was run"):
        rows = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items())
        st.html(f'<dl class="tw-facts">{rows}</dl>')


def measured(found: dict[str, Any] | None) -> str:
    """What `twell verify` found, by name."""
    values = {
        k: number(v) if isinstance(v, float) else whole(v) if isinstance(v, int) else v
        for k, v in (found or {}).items()
    }
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def page(run: Run) -> None:
    """Headline, the layers, and what is worth a look."""
    headline(run)
    with widgets.show_errors():
        layers(run)
    with widgets.show_errors():
        worth_a_look(run)
    what_was_run(run)


with widgets.show_errors():
    page(current_run())
