"""Page Compare: this run and another side by side, number by number and layer by layer."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.compare import of_generated, of_one_text
from twell.analysis.comparisons import FALSE_DISCOVERIES
from twell.analysis.figures.compare import (
    differences,
    frontier,
    layers_of,
    measures,
    position_ratios,
    ratio_panels,
    side_by_side,
)
from twell.analysis.memo import built_once
from twell.analysis.speed.ffn_speedup import conditions
from twell.app.runs.changes_view import beyond_chance, draw_changes
from twell.app.runs.comparison import is_copy, likeness_sentence, same_text, similarity
from twell.app.runs.trainings_view import draw_trainings
from twell.app.ui import run_header, widgets
from twell.app.ui.formatting import (
    BANDS,
    fixed,
    interval,
    layer_width,
    message_markdown,
    pass_spread,
    percent,
    plural,
    times,
    token_html,
    typeset,
    whole,
    with_intervals,
)
from twell.app.ui.query import fetch, query_with_others
from twell.app.ui.run_cache import shown
from twell.app.ui.run_catalog import RunCatalog, find_runs, run_label
from twell.app.ui.url_state import current_run, one_of, run_name, url_param
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run

NUMBERS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("Counted tokens", "tokens", lambda v: whole(v) if v is not None else "–"),
    ("Sparsity", "sparsity", percent),
)
LISTED_TOKENS = 12


def other_run(run: Run, catalog: RunCatalog) -> Run | None:
    """Draw the choice of the run to compare with, and return it; None if there is no other."""
    current = run_name()
    runs = {name: other for name, other in catalog.runs.items() if name != current and other.manifest.tokens}
    names = [name for name, other in runs.items() if not is_copy(run, other)] or list(runs)
    if not names:
        return None
    default = max(names, key=lambda name: similarity(run, catalog.runs[name]))
    param = url_param("with", default, one_of(names))
    name = st.selectbox("Compare with", names, format_func=lambda key: run_label(key, catalog), width=420, **param)
    return shown(catalog.runs[str(name)])


def speedup_with_spread(overview: dict[str, Any]) -> str:
    """Return a run's FFN speedup with its interval and the layers that were timed, from its `analysis.overview`."""
    if overview["speedup"] is None:
        return "–"
    low, high = times(overview["speedup_low"]), times(overview["speedup_high"])
    span = f"{low} to {high} with 95 % confidence" if overview["speedup_turns"] > 1 else "timed once"
    return f"{times(overview['speedup'])} ({span}), {overview['speedup_layers']}"


def pass_with_spread(overview: dict[str, Any]) -> str:
    """Return the speedup of a run's whole pass with how sure it is, from its `analysis.overview`."""
    if overview["pass_speedup"] is None:
        return "–"
    spread = pass_spread(overview["pass_low"], overview["pass_high"], overview["pass_repeats"])
    return f"{times(overview['pass_speedup'])} ({spread})"


def draw_headline(runs: tuple[Run, Run]) -> None:
    """Draw what was run in both runs, and how sure their speeds are, side by side."""
    overviews = [fetch(run, analysis.overview) for run in runs]
    facts = {
        "Model": [str(run.manifest.model["name"]) for run in runs],
        "Layers × d_ff": [f"{run.layers} × {layer_width(run)}" for run in runs],
        "Text": [", ".join(str(t.get("source", "?")) for t in run.manifest.text) for run in runs],
        "Kernel": [f"{r.manifest.kernel['name']}, {r.manifest.dtype} on {r.manifest.device}" for r in runs],
    }
    rows = [(name, *values) for name, values in facts.items()]
    rows += [(name, *(form(overview[key]) for overview in overviews)) for name, key, form in NUMBERS]
    rows.append(("FFN speedup", *(speedup_with_spread(overview) for overview in overviews)))
    rows.append(("Speedup of a whole pass", *(pass_with_spread(overview) for overview in overviews)))
    head = "".join(f"<span>{html.escape(run.name)}</span>" for run in runs)
    body = "".join(
        f"<div><span>{html.escape(name)}</span><span>{html.escape(a)}</span><span>{html.escape(b)}</span></div>"
        for name, a, b in rows
    )
    widgets.heading("What was run")
    st.html(f'<div class="tw-two"><div class="names"><span></span>{head}</div>{body}</div>')
    if len(timed := [run for run, overview in zip(runs, overviews, strict=True) if overview["speedup"]]):
        held = "; ".join(f"{run.name} {conditions(run)}" for run in timed)
        widgets.note(html.escape(typeset(f"FFN speedups hold for: {held}.")))
    if not of_one_text(runs) and all(overview["loss"] is not None for overview in overviews):
        widgets.note("Texts or vocabularies differ, so the losses do not show which model predicts better.")
    if clauses := of_generated(runs):
        widgets.note(html.escape(f"Mind that {'; '.join(clauses)}."))
    if len({run.manifest.nnz_definition for run in runs}) > 1:
        st.warning("The two runs count nnz by different rules. See “What is nnz?” of each before you compare them.")


def draw_by_layer(runs: tuple[Run, Run]) -> None:
    """Draw both runs layer by layer, and the difference of their mean nnz."""
    result = query_with_others(runs[0], [runs[1]], layers_of)
    frame = result.frame
    depth = "" if runs[0].layers == runs[1].layers else " From the first layer of each, on top, to its last."
    widgets.heading(
        "Layer by layer",
        f"Filled: {runs[0].name}; open: {runs[1].name}.{depth} The number of dead neurons depends on how much text was "
        "read.",
        result,
    )
    widgets.draw(built_once(side_by_side, frame, measures(frame)), "layers", "Both runs by layer", wide=True)
    result = query_with_others(runs[0], [runs[1]], analysis.compare_layers)
    frame = result.frame
    caption = (
        f"Mean nnz of {runs[0].name} minus that of {runs[1].name}, {with_intervals(frame['low'])}; at the right, the "
        f"ratio. {pairing_sentence(frame)}{partners_sentence(runs)}"
    )
    widgets.heading("The difference by layer", caption, result)
    widgets.draw(built_once(differences, frame), "differences", "Difference of mean nnz by layer")


def pairing_sentence(frame: pd.DataFrame) -> str:
    """Return a sentence on how the intervals of `analysis.compare_layers` were computed."""
    if frame["paired"].all():
        return "Both runs read the same sequences, so they are compared pair by pair."
    return "The runs read different sequences, so they are compared as independent."


def partners_sentence(runs: tuple[Run, Run]) -> str:
    """Return, after a space, which layers are compared and out of how many neurons; "" where both runs agree."""
    depth = (
        f" Layers are paired by relative depth, since the models have {runs[0].layers} and {runs[1].layers}: that of "
        f"{runs[0].name} / that of {runs[1].name}, first with first and last with last; other layers are left out."
        if runs[0].layers != runs[1].layers
        else ""
    )
    width = (
        f" A layer has {layer_width(runs[0])} neurons and {layer_width(runs[1])}, so equal counts are not equal "
        "sparsity."
        if set(runs[0].manifest.widths) != set(runs[1].manifest.widths)  # in however many layers
        else ""
    )
    return depth + width


def draw_by_position(runs: tuple[Run, Run]) -> None:
    """Draw how the ratio of the runs' mean nnz changes along a sequence, a panel a layer."""
    result = query_with_others(runs[0], [runs[1]], analysis.compare_positions).then(position_ratios)
    frame = result.frame
    caption = (
        f"Mean nnz of {runs[0].name} / mean nnz of {runs[1].name}; both axes logarithmic; "
        f"{with_intervals(frame['low'], BANDS)}.{partners_sentence(runs)}"
    )
    widgets.heading("The ratio by position", caption, result)
    widgets.draw(built_once(ratio_panels, frame), "ratios", "Ratio of mean nnz by position, a panel a layer", wide=True)


def draw_by_token(runs: tuple[Run, Run]) -> None:
    """Draw the tokens whose z differs most clearly. Raises Missing if the runs have different vocabularies."""
    result = query_with_others(runs[0], [runs[1]], analysis.compare_tokens)
    frame = result.frame
    told, clear = frame["low"].notna().any(), frame["q"] <= FALSE_DISCOVERIES
    pairing = "which both runs read" if frame["paired"].all() else "the runs taken as independent"
    caption = (
        f"z in {runs[0].name} minus z in {runs[1].name}, for {plural(len(frame), 'token')} that occur at least 20 "
        f"times in both, {with_intervals(frame['low'], f' clustered by document, {pairing}')}. Largest difference "
        f"{'relative to its standard error ' if told else ''}first.{beyond_chance(clear) if told else ''}"
    )
    title = "Tokens with the clearest difference" if clear.any() else "Tokens with the largest difference"
    widgets.heading(title, caption, result)
    lines = "".join(
        f"<div><span>{token_html(r.text)}</span><span>{fixed(r.z)}</span><span>{fixed(r.first_z)}</span>"
        f"<span>{fixed(r.difference)}{interval(r.low, r.high, fixed)}{', may be chance' * (r.q > FALSE_DISCOVERIES)}"
        "</span></div>"
        for r in frame.head(LISTED_TOKENS).itertuples()
    )
    names = [html.escape(run.name) for run in runs]
    head = f"<span></span><span>z, {names[0]}</span><span>z, {names[1]}</span><span>difference</span>"
    st.html(f'<div class="tw-two four"><div class="names">{head}</div>{lines}</div>')


def why_unreadable(run: Run) -> str:
    """Bring a run's summaries up to date; return why its headline numbers cannot be computed, "" if they can."""
    try:
        run_header.update_summaries(run)
        fetch(run, analysis.by_layer)
    except (UserError, OSError) as error:
        return str(error)
    return ""


def draw_all_runs(run: Run, catalog: RunCatalog) -> None:
    """Draw loss, nnz and speed of every run over this text; name those that cannot be read."""
    others = []
    for other in same_text(run, list(catalog.runs.values())):
        if reason := why_unreadable(other):
            st.warning(message_markdown(f"{other.name} is left out: {reason}"))
        else:
            others.append(other)
    if not others:
        return
    result = query_with_others(run, others, analysis.compare_runs)
    frame = result.frame
    widgets.heading(
        "Loss, nnz and speed",
        f"{plural(len(frame), 'run')} over this text and vocabulary; {run.name} in blue. Filled dots, along the dotted "
        "line, are the best trade-offs: no other run is as good in loss and in the share of neurons that fire, and "
        "better in one of them. Labels give the FFN speedup.",
        result,
    )
    widgets.draw(
        built_once(frontier, frame, run.name), "frontier", "Loss against the share of neurons that fire, a dot a run"
    )


def draw_page(run: Run) -> None:
    """Draw the two runs side by side, and all runs over one text."""
    catalog = find_runs()
    if run.manifest.only_trains:
        draw_trainings(run, catalog)
        return
    other = other_run(run, catalog)
    if other is None:
        st.info(
            "There is no other run here to compare with. Record one with twell capture, or read your own text on the "
            "Text page."
        )
        return
    runs = (run, other)
    widgets.note(html.escape(likeness_sentence(run, other)))
    run_header.left_out(other)
    run_header.update_summaries(other)
    with widgets.show_errors():
        draw_changes(runs)
    draw_headline(runs)
    with widgets.show_errors():
        draw_all_runs(run, catalog)
    for draw in (draw_by_layer, draw_by_position, draw_by_token):
        with widgets.show_errors():
            draw(runs)


widgets.title("How does this run differ from another?")
with widgets.show_errors():
    draw_page(current_run())
