"""Which layer is worth speeding up: what each could still gain, and what it has saved."""

from __future__ import annotations

from contextlib import suppress

import streamlit as st

from twell import analysis
from twell.analysis.figures.speed.potential import MOST, gains
from twell.analysis.memo import built_once
from twell.analysis.speed.potential import worth_speeding_up
from twell.analysis.speed.speedup import sizes
from twell.app.ui import widgets
from twell.app.ui.formatting import number, plural
from twell.app.ui.query import fetch, query
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


def say_where_to_gain(run: Run) -> None:
    """Draw the sentence about the layer with most to gain; nothing where the run cannot tell."""
    with suppress(Missing):
        table = fetch(run, analysis.layer_potential)
        if table.attrs["comparable"]:
            st.markdown(widgets.escape_markdown(worth_speeding_up(table)))


def draw_potential(run: Run) -> None:
    """Draw the bar of each layer; nothing where the run cannot tell."""
    result = query(run, analysis.layer_potential)
    if not result.known or not result.frame.attrs["comparable"]:
        return
    table = result.frame
    rows, whole = sizes(run)["ffn_sparse"], table.attrs["sparse_ms"]
    unchanged = whole - float(table["left_ms"].sum())
    lower = "Grey: what it saves over dense" + ("; red: lost to dense." if (table["saved_ms"] < 0).any() else ".")
    shared = f" The last bar is the mean of {len(table) - MOST + 1} layers." if len(table) > MOST else ""
    caption = (
        "Blue: what a layer could still save if all of its sparse FFN but the gate product, which nothing spares it, "
        f"were free; at the right in ms and of the sparse pass. {lower} What no layer's sparse FFN changes is left "
        f"out: {number(unchanged)} of the {number(whole)} ms that a sparse pass over {plural(rows, 'row')} takes "
        f"({number(table.attrs['dense_ms'])} dense).{shared}"
    )
    widgets.heading("Which layer is worth speeding up?", caption, result)
    widgets.draw(
        built_once(gains, table), "potential", "What each layer could still gain and has saved, most to gain first"
    )
