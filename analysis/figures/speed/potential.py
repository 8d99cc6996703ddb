"""The waterfall from the dense pass through the sparse one to its ceiling, a step a layer."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from twell.analysis.figures.labels import number, percent
from twell.analysis.figures.style import BLUE, GREY, finish

NAMED = 6  # layers that have a step of their own on each side; the others share one


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
