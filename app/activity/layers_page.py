"""Layers: how active each layer is, how that spreads over tokens, and whether it follows the loss."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from twell import analysis
from twell.app.activity.layer_data import CORRELATION, SPREAD, SURPRISAL, layer_rows
from twell.app.activity.layer_figures import ridges
from twell.app.ui import widgets
from twell.app.ui.figures.small_multiples import small_multiples
from twell.app.ui.formatting import fixed, number, percent, plural, rare, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import current_run, one_of, url_param
from twell.workbench.run.store import Run

LOSSES = {"next": "Loss of the next token", "own": "Loss of the token itself"}


def distributions(run: Run) -> None:
    """Distribution, share and dead neurons, a row a layer."""
    frame = fetch(run, analysis.by_layer)
    tokens = int(frame["tokens"].max())
    dead = f" Dead: never fired on these tokens, so its density is below {rare(3 / max(tokens, 1))} (95 %)." * bool(
        frame["dead_share"].notna().any()
    )
    widgets.heading(
        "Activity by layer",
        f"Exact counts of {plural(tokens, 'token')} in {plural(run.manifest.sequences, 'sequence')}, logarithmic axis "
        f"that starts with 0.{second_relu(frame)}{dead}",
        query(run, layer_rows),
    )
    widgets.draw(ridges(fetch(run, SPREAD), frame), "ridges", "Distribution of nnz in each layer", wide=True)


def second_relu(frame: pd.DataFrame) -> str:
    """What a ReLU on the up branch leaves of the fired neurons, where the model has one."""
    if "used" not in frame or not frame["used"].notna().any():
        return ""
    share = frame["used"].sum() / max(frame["mean"].sum(), 1e-9)
    return f" ○: fired neurons whose product is not zero, {percent(share)} of them."


def surprisal(run: Run) -> None:
    """Whether a token fires more neurons where the model predicts worse, or where it was predicted badly itself."""
    above = st.container()
    tie = url_param("of", "next", one_of(LOSSES))
    of = st.segmented_control(
        "Loss", list(LOSSES), format_func=lambda o: LOSSES[o], required=True, label_visibility="collapsed", **tie
    )
    result = query(run, SURPRISAL.where(of=of))
    with above:
        frame = result.frame
    correlation = fetch(run, CORRELATION.where(of=of)).set_index("layer")
    hover = [
        f"loss {r.loss_low:.2f}–{r.loss_high:.2f} nats<br>mean nnz {number(r.nnz_mean)}, n = {whole(r.tokens)}"
        for r in frame.itertuples()
    ]
    which = "the prediction made at the token" if of == "next" else "the token itself, as predicted before it"
    with above:
        widgets.heading(
            "Activity and surprise",
            f"Mean nnz relative to the layer's mean, against the loss of {which}, in bins of equal counts. The last "
            f"bin is open, and drawn where it begins; {widgets.interval_note(run)}. "
            "ρ: Spearman's correlation over tokens.",
            result,
        )
    titles = {
        layer: f"L{layer} · ρ {fixed(correlation['spearman'].get(layer, float('nan')))}"
        for layer in frame["layer"].unique()
    }
    figure = small_multiples(frame.assign(hover=hover), "loss", titles, "loss, nats", "nnz / layer mean")
    widgets.draw(figure, "surprisal", "Mean nnz against loss, by layer", wide=True)


widgets.title("How active is each layer?")
with widgets.show_errors():
    distributions(current_run())
with widgets.show_errors():
    surprisal(current_run())
