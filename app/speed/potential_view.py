"""Which layer is worth speeding up: a waterfall from the dense pass through the sparse one to its ceiling."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
import streamlit as st

from twell import analysis
from twell.analysis.speed.potential import worth_speeding_up
from twell.app.ui import widgets
from twell.app.ui.figures.plot_style import finish
from twell.app.ui.formatting import number, percent
from twell.app.ui.query import query
from twell.app.ui.theme import BLUE, GREY
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

NAMED = 6  # layers that have a step of their own on each side; the others share one


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


def steps(table: pd.DataFrame) -> list[tuple[str, str, float]]:
    """Return the steps of the waterfall as (name, kind, ms): kind is "absolute", "relative" or "total"."""
    rows = [("dense", "absolute", table.attrs["dense_ms"])]
    for column, end in (("saved_ms", "sparse"), ("left_ms", "ceiling")):
        ordered = table.sort_values(column, ascending=False, key=abs)
        named, rest = ordered[:NAMED].sort_values("layer"), ordered[NAMED:]
        rows += [(f"L{row.layer}", "relative", -float(getattr(row, column))) for row in named.itertuples()]
        if len(rest):
            rows.append((f"{len(rest)} more", "relative", -float(rest[column].sum())))
        if end == "sparse":  # timed by itself: the layers' savings need not add up to it exactly
            rows.append(("rest", "relative", table.attrs["sparse_ms"] - sum(value for _, _, value in rows)))
        rows.append((end, "total", 0.0))
    return rows


def waterfall(table: pd.DataFrame) -> go.Figure:
    """Return the waterfall of `steps`."""
    rows = steps(table)
    whole, level, texts = table.attrs["dense_ms"], 0.0, []
    for _, kind, value in rows:
        level += value
        shown = level if kind != "relative" else value
        texts.append(f"{number(shown)} ms, {percent(abs(shown) / whole)} of the dense pass")
    figure = go.Figure(
        go.Waterfall(
            x=list(range(len(rows))),
            y=[value for _, _, value in rows],
            measure=[kind for _, kind, _ in rows],
            customdata=texts,
            hovertemplate="%{customdata}<extra></extra>",
            decreasing={"marker": {"color": BLUE}},
            increasing={"marker": {"color": "#c2554d"}},
            totals={"marker": {"color": GREY}},
            connector={"line": {"color": GREY, "width": 0.5}},
        )
    )
    finish(figure, 320, left=64)
    figure.update_xaxes(tickvals=list(range(len(rows))), ticktext=[name for name, _, _ in rows], showgrid=False)
    figure.update_yaxes(title="ms of a pass", rangemode="tozero")
    return figure
