"""Compare: this run beside another, number by number and layer by layer."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.compare import of_one_text
from twell.app.runs.compare_figures import differences, frontier, side_by_side
from twell.app.runs.comparison import by_place, layers_of, same_text
from twell.app.ui import run_header, widgets
from twell.app.ui.figures.small_multiples import small_multiples
from twell.app.ui.formatting import fixed, number, percent, plural, times, token_html, whole
from twell.app.ui.query import fetch, query_with_others
from twell.app.ui.run_catalog import RunCatalog, find_runs, run_label
from twell.app.ui.url_state import current_run, one_of, run_name, url_param
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run

NUMBERS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("Tokens", "tokens", lambda v: whole(v) if v is not None else "–"),
    ("Sparsity", "sparsity", percent),
    ("nnz per token and layer", "nnz_mean", number),
    ("Next-token loss, nats", "loss", number),
    ("Dead neurons", "dead_share", percent),
    ("FFN speedup", "speedup", times),
)
MOVED = 12  # tokens that are listed
FEW = 1000  # tokens: a run of fewer is no measure for another


def other_run(run: Run, found: RunCatalog) -> Run | None:
    """The run to compare with, carried by the address."""
    here = run_name()
    names = [name for name, other in found.runs.items() if name != here and other.manifest.tokens]
    if not names:
        return None
    like = max(names, key=lambda name: likeness(run, found.runs[name]))
    tie = url_param("with", like, one_of(names))
    name = st.selectbox("Beside", names, format_func=lambda n: run_label(n, found), width=420, **tie)
    return found.runs[str(name)]


def likeness(run: Run, other: Run) -> tuple[bool, bool, bool, int]:
    """How much there is to compare, the most first: the same text; the same weights, over more than a few words; as
    many layers; then how many tokens."""
    weights = run.manifest.model.get("weights")
    same = weights is not None and weights == other.manifest.model.get("weights") and other.manifest.tokens >= FEW
    return bool(same_text(run, [other])), same, other.layers == run.layers, other.manifest.tokens


def headline(runs: tuple[Run, Run]) -> None:
    """The numbers that runs are known by, and what differs in what was run."""
    answers = [fetch(run, analysis.overview) for run in runs]
    facts = {
        "Model": [str(run.manifest.model["name"]) for run in runs],
        "Layers × d_ff": [f"{run.layers} × {whole(run.d_ff)}" for run in runs],
        "Text": [", ".join(str(t.get("source", "?")) for t in run.manifest.text) for run in runs],
        "Kernel": [f"{r.manifest.kernel['name']}, {r.manifest.dtype} on {r.manifest.device}" for r in runs],
    }
    rows = [(name, *values) for name, values in facts.items()]
    rows += [(name, *(show(answer[key]) for answer in answers)) for name, key, show in NUMBERS]
    head = "".join(f"<span>{html.escape(run.name)}</span>" for run in runs)
    body = "".join(
        f"<div><span>{html.escape(name)}</span><span>{html.escape(a)}</span><span>{html.escape(b)}</span></div>"
        for name, a, b in rows
    )
    st.html(f'<div class="tw-two"><div class="names"><span></span>{head}</div>{body}</div>')
    if not of_one_text(runs) and all(answer["loss"] is not None for answer in answers):
        widgets.note("Texts or vocabularies differ, so the losses say nothing about which model predicts better.")
    if len({run.manifest.nnz_definition for run in runs}) > 1:
        st.warning("The two runs count nnz by different rules: see “What is nnz?” of each before comparing them.")


def by_layer(runs: tuple[Run, Run]) -> None:
    """Layer by layer: both, and how sure the difference is."""
    result = query_with_others(runs[0], [runs[1]], layers_of)
    frame = result.frame
    measures = {"mean": "mean nnz", "sparsity": "sparsity"}
    if frame["dead_share"].notna().all():
        measures |= {"dead_share": "share of dead neurons"}
    widgets.heading(
        "Layer by layer",
        f"Filled: {runs[0].name}; open: {runs[1].name}. The number of dead neurons depends on how much text was read.",
        result,
    )
    widgets.draw(side_by_side(frame, measures), "layers", "Both runs by layer", wide=True)
    result = query_with_others(runs[0], [runs[1]], analysis.compare_layers)
    found = result.frame
    widgets.heading(
        "The difference by layer",
        f"Mean nnz of {runs[0].name} minus that of {runs[1].name}, with 95 % intervals; at the right, the ratio. "
        f"{paired(found)}",
        result,
    )
    widgets.draw(differences(found), "differences", "Difference of mean nnz by layer")


def paired(found: pd.DataFrame) -> str:
    """How the intervals were found, in a sentence."""
    if found["paired"].all():
        return "Both read the same sequences, so they are compared in pairs."
    return "The runs read different sequences, so they are compared as independent."


def by_position(runs: tuple[Run, Run]) -> None:
    """How the ratio of the two changes along a sequence, a panel a layer."""
    result = query_with_others(runs[0], [runs[1]], analysis.compare_positions).then(by_place)
    found = result.frame
    hover = [
        f"position about {number(r.position, 2)}<br>{times(r.relative)} (95 % {times(r.low)} to {times(r.high)})"
        for r in found.itertuples()
    ]
    said = (
        f"Mean nnz of {runs[0].name} over that of {runs[1].name}; position logarithmic; {widgets.interval_note(*runs)}."
    )
    widgets.heading("The ratio by position", said, result)
    titles = {int(layer): f"L{layer}" for layer in found["layer"].unique()}
    figure = small_multiples(
        found.assign(hover=hover), "position", titles, "position, tokens", "ratio of mean nnz", log=True
    )
    widgets.draw(figure, "ratios", "Ratio of mean nnz by position, a panel a layer", wide=True)


def by_token(runs: tuple[Run, Run]) -> None:
    """Tokens whose place in the ranking differs most surely, where both runs have one vocabulary."""
    result = query_with_others(runs[0], [runs[1]], analysis.compare_tokens)
    found = result.frame
    widgets.heading(
        "Tokens that moved most surely",
        f"Of {plural(len(found), 'token')} seen at least 20 times in both: z in {runs[0].name} minus that in "
        f"{runs[1].name}, with 95 % intervals clustered by sequence, largest against their standard error first.",
        result,
    )
    lines = "".join(
        f"<div><span>{token_html(r.text)}</span><span>{fixed(r.z)}</span><span>{fixed(r.first_z)}</span>"
        f"<span>{fixed(r.difference)} ({fixed(r.low)} to {fixed(r.high)})</span></div>"
        for r in found.head(MOVED).itertuples()
    )
    names = [html.escape(run.name) for run in runs]
    head = f"<span></span><span>z, {names[0]}</span><span>z, {names[1]}</span><span>difference</span>"
    st.html(f'<div class="tw-two four"><div class="names">{head}</div>{lines}</div>')


def readable(run: Run) -> bool:
    """Whether the run has what its numbers take; its summaries are brought up to date."""
    try:
        run_header.update_summaries(run)
        fetch(run, analysis.by_layer)
    except (UserError, OSError):
        return False
    return True


def all_of_the_text(run: Run, found: RunCatalog) -> None:
    """Loss, nnz and speed of every run over this text."""
    others = [other for other in same_text(run, list(found.runs.values())) if readable(other)]
    if not others:
        return
    result = query_with_others(run, others, analysis.compare_runs)
    frame = result.frame
    widgets.heading(
        "Loss, nnz and speed",
        f"{plural(len(frame), 'run')} over this text and vocabulary; blue: {run.name}. Filled, along the dotted line: "
        "no other run is as good in loss and in the share of neurons that fire, and better in one of them. Labels give "
        "the speedup of the FFN.",
        result,
    )
    widgets.draw(frontier(frame, run.name), "frontier", "Loss against the share of neurons that fire, a dot a run")


def page(run: Run) -> None:
    """The two runs side by side, then all of one text."""
    found = find_runs()
    other = other_run(run, found)
    if other is None:
        st.info("There is no other run here to compare with: record one, or read a text of your own on the Text page.")
        return
    runs = (run, other)
    run_header.update_summaries(other)
    headline(runs)
    with widgets.show_errors():
        all_of_the_text(run, found)
    for show in (by_layer, by_position, by_token):
        with widgets.show_errors():
            show(runs)


widgets.title("How does it differ from another run?")
with widgets.show_errors():
    page(current_run())
