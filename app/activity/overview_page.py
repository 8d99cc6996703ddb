"""Page Overview: the run's headline numbers, a figure of its layers, what stands out, and what was run."""

from __future__ import annotations

import html
from contextlib import suppress
from itertools import groupby
from typing import Any

import streamlit as st

from twell import analysis
from twell.analysis.exports.documents.introduction import introduction
from twell.analysis.figures.overview import BLOCKS, comparable_speedup, layer_by_layer, layer_rows
from twell.analysis.figures.speed.bench_beside import bench_speedup, beside_capture
from twell.analysis.figures.speed.whole_beside import whole_beside
from twell.analysis.figures.style import GREY
from twell.analysis.memo import built_once
from twell.analysis.speed.ffn_speedup import conditions
from twell.analysis.speed.potential import most_to_gain
from twell.app.activity.highlights import PICTURES, highlights
from twell.app.jobs.dead_weights import why_dead
from twell.app.jobs.live_view import follow
from twell.app.jobs.own_text import own_text_link
from twell.app.ui import widgets
from twell.app.ui.formatting import (
    SPACE,
    dead_limit,
    layer_width,
    number,
    pass_spread,
    percent,
    plural,
    times,
    typeset,
    whole,
)
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import current_run, link, open_page, run_name, sync_url
from twell.workbench.errors import Missing
from twell.workbench.run.manifest import RECORDING
from twell.workbench.run.store import Run


def draw_headline(run: Run) -> None:
    """Draw an introduction, and the headline numbers of `analysis.overview`, each with what it is computed from."""
    numbers = fetch(run, analysis.overview)
    tokens = numbers["tokens"]
    if tokens is None:
        widgets.show_missing(numbers["missing"]["tokens"])
        return
    st.html(f'<p class="tw-lead">{html.escape(typeset(introduction(run, numbers)))} {own_text_link(run)}</p>')
    made = ", those of generated tokens among them" if run.manifest.options.get("generate") else ""  # which are easier
    loss = f"over {plural(numbers['loss_tokens'], 'prediction')}{made}" if numbers["loss_tokens"] else "not recorded"
    values = (
        ("Sparsity", percent(numbers["sparsity"]), f"1 − nnz / d_ff, over {plural(run.layers, 'layer')}"),
        (
            "nnz per token and layer",
            number(numbers["nnz_mean"]),
            f"of {layer_width(run)} neurons, {plural(tokens, 'counted token')}",
            *used_notes(numbers),
        ),
        ("Next-token loss", f"{number(numbers['loss'])} nats" if numbers["loss"] is not None else "–", loss),
        ("Dead neurons", percent(numbers["dead_share"]), *dead_notes(run, numbers)),
        ("FFN speedup", *ffn_speedup(run, numbers)),
    )
    widgets.numbers(values)
    if numbers["speedup"] is not None and (bench := fetch(run, beside_capture)):
        kernels = f'<a href="{link("kernels")}">Both, layer by layer</a>'
        widgets.note(f"FFN speedup here {times(numbers['speedup'])}; {html.escape(typeset(bench))} {kernels}.")
    if whole_model := fetch(run, whole_beside):
        widgets.note(f'{html.escape(typeset(whole_model))} <a href="{link("kernels")}">All cases</a>.')


def used_notes(numbers: dict[str, Any]) -> tuple[str, ...]:
    """Return what is folded under nnz: how many of the fired neurons have a product; nothing where all have."""
    if numbers["used_mean"] is None:
        return ()
    share = percent(numbers["used_mean"] / numbers["nnz_mean"]) if numbers["nnz_mean"] else "none"
    return (f"{number(numbers['used_mean'])} of these, {share}, are used: the ReLU on the up branch lets them pass.",)


def dead_notes(run: Run, numbers: dict[str, Any]) -> tuple[str, ...]:
    """Return what stands under the share of dead neurons, and what is folded there."""
    if numbers["dead"] is None:
        return (
            "one of their files cannot be read: see page Neurons"
            if run.has("neurons")
            else "not recorded: capture with --probes neurons",
        )
    why = why_dead(run)
    neurons, tokens = run.neurons, plural(numbers["tokens"], "counted token")
    return (
        f"{whole(numbers['dead'])} of {whole(neurons)} never fired in {tokens}" + (f": {why}" if why else ""),
        f"Of {plural(run.manifest.sequences, 'sequence')}. Each fires "
        f"{dead_limit(run, numbers['tokens'])}. Page Neurons lists them.",
    )


def ffn_speedup(run: Run, numbers: dict[str, Any]) -> tuple[str, ...]:
    """Return the FFN speedup, what stands under it, the interval and the layers, and what is folded there; that of
    `twell bench` where the capture timed none."""
    if numbers["speedup"] is None:
        if numbers["kernel"]:
            return "–", "none is claimed from the slow reference kernel"
        found = fetch(run, bench_speedup)
        return (
            (times(found[0]), f"by twell bench, {found[1]}; not timed in the capture") if found else ("–", "not timed")
        )
    span = (
        f"{times(numbers['speedup_low'])} to {times(numbers['speedup_high'])} with 95{SPACE}% confidence over "
        f"{plural(numbers['speedup_turns'], 'batch', 'es')}, "
        if numbers["speedup_turns"] > 1
        else ""
    )
    mean = "geometric mean of the batches' ratios, " if numbers["speedup_turns"] > 1 else ""
    sentences = [f"Dense time / sparse time, {mean}{numbers['kernel']} kernel, {conditions(run)}"]
    sentences += [sentence.rstrip(".") for sentence in numbers["speedup_caveats"]]
    if (whole_pass := numbers["pass_speedup"]) is not None:
        spread = pass_spread(numbers["pass_low"], numbers["pass_high"], numbers["pass_repeats"])
        sentences.append(f"The whole pass {times(whole_pass)} ({spread})")
    about = f"{span}{numbers['speedup_layers']}"
    return times(numbers["speedup"]), about, typeset(". ".join(sentences) + ".")


def draw_layers(run: Run) -> None:
    """Draw the figure with a row a layer: mean nnz by position, nnz of a token, dead neurons, FFN speedup."""
    blocks, by_layer = fetch(run, analysis.position_blocks, blocks=BLOCKS), fetch(run, analysis.by_layer)
    speedup = fetch(run, comparable_speedup)
    tokens = blocks.groupby("layer")["tokens"].sum().max()
    first = ", position 0 included" if (blocks["position_from"] == 0).any() else ""
    counted = int(by_layer["tokens"].max())
    others = f" The other panels: the {whole(counted)} that are counted." if counted != tokens else ""
    caption = (
        f"By position: {plural(tokens, 'token')}, the same in every layer{first}.{others} Shades are logarithmic. "
        "Choose a cell, a dot or a bar for the page that says more."
    )
    widgets.heading("Layer by layer", caption, query(run, layer_rows))
    with suppress(Missing):
        table = fetch(run, analysis.layer_potential)
        if table.attrs["comparable"]:
            sentence = html.escape(typeset(most_to_gain(table)))
            bars = (
                "Where the bar of FFN speedup is long, time has been saved already; the bar of the layer with most to "
                "gain is amber. "
            )
            st.html(
                f'<p class="tw-said">{bars * (len(table) > 1)}{sentence} '
                f'<a class="plain tw-chip" href="{link("kernels")}">'
                "Each layer, on Kernels\u00a0→</a></p>"
            )
    alt = "By layer: mean nnz by position, nnz of a token, neurons that never fired, FFN speedup"
    figure = built_once(widgets.with_links, layer_by_layer, blocks, by_layer, speedup)
    event = widgets.draw(figure, "layer-by-layer", alt, wide=True, on_select=sync_url, selection_mode="points")
    for point in event.selection.points:
        follow_point(figure.data[point["curve_number"]], int(point["y"]))


def follow_point(trace: Any, layer: int) -> None:
    """Open the page that says more about what was chosen in the figure of layers.

    Args:
        trace: the trace of the chosen point.
        layer: the layer of the chosen point.
    """
    if trace.type == "bar" and trace.marker.color == GREY:
        open_page("neurons", run=run_name(), kind="dead", layer=f"L{layer}")
    elif trace.type == "bar":
        open_page("kernels", run=run_name(), layer=f"L{layer}")
    elif trace.name == widgets.LINKS:
        open_page("positions", run=run_name())
    else:
        open_page("layers", run=run_name())


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
            with suppress(Missing):
                st.html(PICTURES[page](run))
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


widgets.title("How sparse is this model, and what does that buy?")
if current_run().manifest.status == RECORDING and not current_run().manifest.training:
    follow(str(current_run().path), with_figure=False)
with widgets.show_errors():
    draw_page(current_run())
