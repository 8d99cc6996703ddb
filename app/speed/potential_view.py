"""Which layer is worth speeding up: a waterfall from the dense pass through the sparse one to its ceiling."""

from __future__ import annotations

import streamlit as st

from twell import analysis
from twell.analysis.figures.speed.potential import waterfall
from twell.analysis.speed.potential import worth_speeding_up
from twell.app.ui import widgets
from twell.app.ui.query import query
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


def draw_potential(run: Run) -> None:
    """Draw the waterfall and the sentence about the layer with most to gain; nothing where the run cannot tell."""
    try:
        result = query(run, analysis.layer_potential)
        table = result.frame
    except Missing:
        return
    if not table.attrs["comparable"]:
        return
    caption = (
        "One pass over a batch, in milliseconds: dense, less what sparse FFNs save, less what they could still save if "
        "all but the gate product were free."
    )
    widgets.heading("Which layer is worth speeding up?", caption, result)
    st.markdown(widgets.escape_markdown(worth_speeding_up(table)))
    widgets.draw(waterfall(table), "potential", "Waterfall from the dense pass to the sparse pass and its ceiling")
