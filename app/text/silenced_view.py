"""A neuron set to zero: the loss on the passage in view, read by the model with the neuron and without it."""

from __future__ import annotations

import html

import pandas as pd
import streamlit as st

from twell.analysis.neurons.by_neuron import parse_neuron
from twell.analysis.neurons.effects import loss_change
from twell.analysis.passage import token_texts
from twell.app.jobs.asking import passage_anew
from twell.app.text.choices import PassageChoice
from twell.app.ui import widgets
from twell.app.ui.formatting import number, plural, signed, visible
from twell.app.ui.query import query
from twell.app.ui.url_state import link, url_param
from twell.workbench.run.store import Run

SHOWN = 10  # predictions that change most
NOTHING = 1e-4  # nats below which a prediction counts as unchanged


def draw_what_if(choice: PassageChoice, anew: Run) -> None:
    """Draw the switch, and what changes without the neuron that shades the passage.

    Args:
        choice: what is chosen.
        anew: the passage as the model reads it with all its neurons.
    """
    location = parse_neuron(choice.shade, choice.shown)
    if location is None:
        return
    param = url_param("zero", False, {"True": True}.get)
    if not st.toggle(f"What if {choice.shade} were zero?", **param):
        return
    without = passage_anew(choice.shown, choice.sequence, silent=location)
    if without is None:
        return
    result = query(anew, loss_change, without=without)
    frame = result.frame
    widgets.heading(f"Without {choice.shade}", sentence(frame), result, key="without")
    st.html(changes_html(choice, frame, anew))


def sentence(frame: pd.DataFrame) -> str:
    """Return what `loss_change` says, in sentences."""
    if frame.empty:
        return "The passage has no prediction to compare."
    before, after = float(frame["loss"].mean()), float(frame["loss_without"].mean())
    worse, better = int((frame["change"] > NOTHING).sum()), int((frame["change"] < -NOTHING).sum())
    return (
        f"Mean loss {number(before, 4)} nats with it, {number(after, 4)} without it ({signed(after - before)}), over "
        f"{plural(len(frame), 'prediction')} of this passage: {worse} get worse (orange), {better} better (blue), "
        f"{len(frame) - worse - better} stay. Computed now, by the run's model; one passage does not tell what the "
        "neuron does elsewhere."
    )


def changes_html(choice: PassageChoice, frame: pd.DataFrame, run: Run) -> str:
    """Return the predictions that change most as HTML, each a link to its token in the passage.

    Args:
        choice: what is chosen, which the links keep.
        frame: the rows of `loss_change`.
        run: the run whose vocabulary names the tokens.
    """
    rows = frame[frame["change"].abs() > NOTHING]
    rows = rows.reindex(rows["change"].abs().sort_values(ascending=False, kind="stable").index).head(SHOWN)
    if rows.empty:
        return '<p class="tw-note">No prediction changes.</p>'
    lines = ['<div class="tw-change names"><span>next token</span><span></span><span>loss</span><span>without</span>']
    lines.append("<span>change</span></div>")
    largest = float(rows["change"].abs().max())
    names = token_texts(run.vocab["bytes"].reindex(rows["token_id"]))
    for row, name in zip(rows.itertuples(), names, strict=True):
        parameters = {**choice.parameters, "sequence": str(choice.sequence), "zero": "True"}
        address = link("text", **parameters, position=int(row.position) + 1)
        kind = "worse" if row.change > 0 else "better"
        lines.append(
            f'<a class="tw-change {kind}" href="{address}"><bdi class="tw-token">{html.escape(visible(name))}</bdi>'
            f'<i><b style="width:{100 * abs(row.change) / largest:.0f}%"></b></i><span>{number(row.loss)}</span>'
            f"<span>{number(row.loss_without)}</span><span>{signed(row.change)}</span></a>"
        )
    return f"<div>{''.join(lines)}</div>"
