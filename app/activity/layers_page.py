"""Page Layers: how active each layer is, how its nnz is distributed over tokens, and whether it follows the loss."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from twell import analysis
from twell.analysis.figures import plots
from twell.analysis.figures.layers import layer_rows
from twell.app.activity.layer_data import BY_LAYER, SURPRISAL, by_surprisal, distributions
from twell.app.ui import widgets
from twell.app.ui.formatting import BANDS, dead_limit, percent, plural, with_intervals
from twell.app.ui.query import Query, fetch, query
from twell.app.ui.questions import Question, draw_questions, noted
from twell.app.ui.url_state import current_run
from twell.workbench.run.store import Run

QUESTIONS = (
    Question(
        "Activity and surprise within tokens",
        Query(analysis.surprisal_within),
        plots.within,
        "Correlation of nnz with the loss of the next token, each less the mean of its token over the run, by layer, "
        "{intervals}. It compares one token in different contexts: above 0, a token fires more where the model"
        " is less sure what follows. The figure above mixes in which tokens come before surprises.",
    ),
    Question(
        "Expected and actual surprise",
        Query(analysis.entropy_correlation),
        plots.expected,
        "Rank correlation of nnz with the entropy of the next token's prediction (what the model expects to lose on"
        " it), with its loss (what it then loses), and with each given the other, by layer, {intervals}. A token"
        " fires before the next one is known: what goes with the loss given the entropy is no reaction to it, but tells"
        " of contexts in which the model errs more, or less, than it expects.",
    ),
    Question(
        "Layers that are busy on the same tokens",
        Query(analysis.across_layers),
        plots.depth,
        "Rank correlation of nnz between every two layers over tokens. Near 1, a token that is busy in one layer is "
        "busy in the other, so that what one layer fires could announce the cost of a later one; near 0, each has "
        "tokens of its own.",
        reads_rows=True,
    ),
    Question(
        "Activity by source of the text",
        Query(analysis.by_source),
        plots.origins,
        "Mean nnz of each source over that of all others, by layer, {intervals}. Sources differ"
        " in more than subject: in which tokens they use, and how well the model predicts them.",
        several="source",
    ),
    Question(
        "Reading against generating",
        Query(analysis.by_phase),
        plots.origins,
        "Mean nnz of prompts that are read (prefill) and of tokens that are generated (decode), each over the other, "
        "by layer, {intervals}. What is generated is what the model found likely, so it is an easier text.",
        several="phase",
    ),
)
LOSSES = {"next": "Loss of the next token", "own": "Loss of the token itself"}


def draw_distributions(run: Run) -> None:
    """Draw each layer's distribution of nnz, its share of the model's nnz, and its dead neurons."""
    frame = fetch(run, BY_LAYER)
    tokens = int(frame["tokens"].max())
    dead = ""
    if frame["dead_share"].notna().any():
        dead = f" Dead: the neuron never fired on this text; it fires {dead_limit(run, tokens)}."
    widgets.heading(
        "Activity by layer",
        f"Exact counts over {plural(tokens, 'counted token')} in {plural(run.manifest.sequences, 'sequence')}. The "
        f"axis is logarithmic and starts at 0.{second_relu_sentence(frame)}{dead}",
        query(run, layer_rows),
    )
    widgets.draw(distributions(run), "ridges", "Distribution of nnz in each layer", wide=True)


def second_relu_sentence(frame: pd.DataFrame) -> str:
    """Return, after a space, the share of fired neurons that a second ReLU leaves; empty if the model has none.

    Args:
        frame: the rows of `analysis.by_layer`; `used` is about a ReLU on the up branch.
    """
    if "used" not in frame or not frame["used"].notna().any():
        return ""
    share = frame["used"].sum() / max(frame["mean"].sum(), 1e-9)
    return f" ○: fired neurons whose product is nonzero ({percent(share)} of those that fire)."


def draw_surprisal(run: Run) -> None:
    """Draw nnz against loss: that of the prediction made at a token or, as the user chooses, the token's own."""
    fetch(run, SURPRISAL.where(of="next"))  # raises Missing before anything is drawn
    heading_area = st.container()
    of = widgets.url_choice("Loss", LOSSES, "of", "next", label_visibility="collapsed")
    result = query(run, SURPRISAL.where(of=of))
    with heading_area:  # Streamlit's spinner appears here while the table is computed
        figure = by_surprisal(run, of)
    loss = "the prediction made at the token" if of == "next" else "the token itself, as predicted before it"
    caption = (
        f"Mean nnz relative to the layer's mean, against the loss of {loss}, in bins of equally many tokens. The last "
        f"bin is open-ended and drawn at its lower end; {with_intervals(result.frame['low'], BANDS)}. ρ: Spearman "
        "correlation over tokens."
    )
    with heading_area:
        widgets.heading("Activity and surprise", caption, result)
    widgets.draw(figure, "surprisal", "Mean nnz against loss, by layer", wide=True)


widgets.title("How active is each layer?")
with widgets.show_errors():
    draw_distributions(current_run())
lacking: dict[str, list[str]] = {}
with widgets.show_errors(), noted("Activity and surprise", lacking):
    draw_surprisal(current_run())
with widgets.show_errors():
    draw_questions(current_run(), QUESTIONS, lacking)
