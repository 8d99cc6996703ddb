"""Which layer is worth speeding up: a waterfall from the dense pass through the sparse one to its ceiling."""

from __future__ import annotations

from contextlib import suppress

import streamlit as st

from twell import analysis
from twell.analysis.figures.speed.potential import waterfall
from twell.analysis.memo import built_once
from twell.analysis.speed.potential import worth_speeding_up
from twell.analysis.speed.speedup import sizes
from twell.app.ui import widgets
from twell.app.ui.formatting import plural
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
    """Draw the waterfall; nothing where the run cannot tell."""
    try:
        result = query(run, analysis.layer_potential)
        table = result.frame
    except Missing:
        return
    if not table.attrs["comparable"]:
        return
    caption = (
        f"One pass over a batch of {plural(sizes(run)['ffn_sparse'], 'row')}, in milliseconds: dense, less what each "
        "layer's sparse FFN saves, less what it could still save if all but its gate product, which nothing spares it, "
        "were free (ceiling). Rest: what else differs between the two passes; red: slower."
    )
    widgets.heading("Which layer is worth speeding up?", caption, result)
    widgets.draw(
        built_once(waterfall, table), "potential", "Waterfall from the dense pass to the sparse pass and its ceiling"
    )
