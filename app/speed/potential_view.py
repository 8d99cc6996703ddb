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
from twell.app.ui.formatting import message_markdown, number, plural
from twell.app.ui.query import fetch, query
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


def say_where_to_gain(run: Run) -> None:
    """Draw the sentence about the layer with most to gain; nothing where the run cannot tell."""
    with suppress(Missing):
        table = fetch(run, analysis.layer_potential)
        if table.attrs["comparable"]:
            st.markdown(message_markdown(worth_speeding_up(table)))


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
        "Blue: what a layer could still save if its sparse FFN took no time beside the gate product, which has to run "
        f"in any case; at the right in ms and as a share of the sparse pass. {lower} Not drawn: the rest of the pass, "
        f"{number(unchanged)} of {number(whole)} ms over {plural(rows, 'row')} ({number(table.attrs['dense_ms'])} "
        f"dense).{shared}"
    )
    widgets.heading("Which layer is worth speeding up?", caption, result)
    widgets.draw(
        built_once(gains, table), "potential", "What each layer could still gain and has saved, most to gain first"
    )
