"""Overview: what was run on what, how sparse it is, and what is worth a look."""

from __future__ import annotations

import html
from itertools import groupby

import streamlit as st

from twell.app import parts
from twell.app.figures import heat_map
from twell.app.findings import findings
from twell.app.state import ask, shown
from twell.app.words import number, percent, plural, times, whole
from twell.workbench.store import Run


def headline(run: Run) -> None:
    """The numbers that a run is known by, each with what it is of."""
    found = ask(run, "overview")
    tokens, missing = found["tokens"], found["missing"]
    if tokens is None:
        st.info(parts.plain(missing["tokens"]))
        return
    neurons = run.layers * run.d_ff
    if found["dead"] is None:
        dead = "not recorded: it takes the neurons probe"
    else:
        dead = (
            f"{whole(found['dead'])} of {whole(neurons)} never fired in {whole(tokens)} tokens of "
            f"{plural(run.manifest.sequences, 'sequence')}: density under "
            f"{number(found['dead_upper'] * 1e6, 2)} per million (95 %)"
        )
    loss = f"over {plural(found['loss_tokens'], 'prediction')}" if found["loss_tokens"] else "not recorded"
    if found["speedup"] is None:
        speed = "no speedup is claimed from the reference kernel" if found["kernel"] else "not timed"
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
    parts.numbers(values)


def worth_a_look(run: Run) -> None:
    """A sentence for each thing that stands out, under a link to the page that shows it."""
    parts.heading("Worth a look")
    for page, group in groupby(findings(run), key=lambda finding: finding.page):
        parts.linked(f"{page}.py", f"{page.capitalize()} →")
        st.html("".join(f'<p class="tw-said">{finding.sentence}</p>' for finding in group))


def map_of_activity(run: Run) -> None:
    """The heat map layer × position."""
    blocks = ask(run, "position_blocks", blocks=16)
    tokens = blocks.groupby("layer")["tokens"].sum().max()
    first = ", position 0 included" if (blocks["position_from"] == 0).any() else ""
    said = f"Mean nnz of a token, logarithmic shade; {plural(tokens, 'token')} a layer{first}."
    parts.heading("Layer × position", said, blocks, run, "analysis.position_blocks(run, blocks=16)")
    parts.draw(heat_map(blocks), "heat-map", "Heat map of mean nnz by layer and position")


def what_was_run(run: Run) -> None:
    """The manifest, for people."""
    m = run.manifest
    text = [
        f"{t.get('source', '?')} ({', '.join(plural(t[k], k[:-1]) for k in ('documents', 'tokens') if t.get(k))})"
        for t in m.text
    ]
    size = [plural(m.model["parameters"], "parameter")] if m.model.get("parameters") else []
    facts = {
        "model": ", ".join([str(m.model[k]) for k in ("name", "revision", "family") if m.model.get(k)] + size),
        "text": "; ".join(text) or "–",
        "device": ", ".join(word for word in (m.device, m.driver, m.dtype) if word),
        "kernel": f"{m.kernel['name']}: {m.kernel.get('reason', '')}",
        "TwELL": f"tile {m.layout['tile']}, compression {m.layout['compression']}, {m.layout['slots']} slots a tile",
        "nnz": m.nnz_definition,
        "recorded": f"{m.created}, in {number(m.seconds)} s",
        "versions": ", ".join(f"{k} {v}" for k, v in m.versions.items()) or "–",
        "parity": ", ".join(f"{k} {v}" for k, v in (m.parity or {}).items()) or "not verified",
        "overhead": ", ".join(f"{k} {v}" for k, v in (m.overhead or {}).items()) or "not measured",
    }
    with st.expander("What was run"):
        rows = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in facts.items())
        st.html(f'<dl class="tw-facts">{rows}</dl>')


def page(run: Run) -> None:
    """Headline, then the map beside what is worth a look."""
    headline(run)
    with st.container(key="pair"):
        left, right = st.columns([3, 2], gap="large")
    with left, parts.told():
        map_of_activity(run)
    with right, parts.told():
        worth_a_look(run)
    what_was_run(run)


with parts.told():
    page(shown())
