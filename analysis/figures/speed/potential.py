"""The figure of what each layer could still gain, and what its sparse FFN has saved: a bar a layer."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go

from twell.analysis.figures.labels import number, percent
from twell.analysis.figures.style import BLUE, LEGEND_ABOVE, finish

MOST = 12  # layers that have a bar each; of more, the others share one
SLOWER = "#c2554d"


def bars(table: pd.DataFrame) -> pd.DataFrame:
    """Return the bars, the layer with most to gain first. Columns: name; left, saved (ms a layer; those that share a
    bar: their mean); total (left_ms of all that it stands for); share (of the sparse pass).

    table: `layer_potential`
    """
    ordered = table.sort_values("left_ms", ascending=False, kind="stable")
    alone, rest = (ordered, ordered[:0]) if len(ordered) <= MOST else (ordered[: MOST - 1], ordered[MOST - 1 :])
    rows = [(f"L{row.layer}", row.left_ms, row.saved_ms, row.left_ms, row.left_share) for row in alone.itertuples()]
    if len(rest):
        means, sums = rest[["left_ms", "saved_ms"]].mean(), rest[["left_ms", "left_share"]].sum()
        rows.append((f"{len(rest)} more, each", *means, *sums))
    return pd.DataFrame(rows, columns=["name", "left", "saved", "total", "share"])


def gains(table: pd.DataFrame) -> go.Figure:
    """Return `bars` as a figure: from 0 what is still to gain, then what was saved; left of 0 what was lost."""
    rows = bars(table)
    places = list(range(len(rows)))
    figure = go.Figure()
    for name, values, color in (
        ("still to gain", rows["left"], BLUE),
        ("saved over dense", rows["saved"].clip(lower=0), "rgba(139, 149, 161, 0.45)"),
        ("lost to dense", rows["saved"].clip(upper=0), SLOWER),
    ):
        if values.any():
            figure.add_bar(
                x=values,
                y=places,
                orientation="h",
                name=name,
                marker={"color": color},
                hovertext=[f"{bar}: {number(abs(ms))} ms {name}" for bar, ms in zip(rows["name"], values, strict=True)],
                hovertemplate="%{hovertext}<extra></extra>",
            )
    finish(figure, 96 + 26 * max(len(rows), 4), left=96, right=150, top=36)
    figure.update_layout(
        barmode="relative", bargap=0.3, showlegend=True, legend={**LEGEND_ABOVE, "traceorder": "normal"}
    )
    figure.update_yaxes(tickvals=places, ticktext=rows["name"], range=[len(rows) - 0.4, -0.6], showgrid=False)
    figure.update_xaxes(title="ms of a pass")
    texts = [_label(row) for row in rows.itertuples()]
    at_right = {"xref": "paper", "xanchor": "left", "x": 1, "xshift": 8, "showarrow": False, "font": {"size": 12}}
    notes = [{**at_right, "text": text, "y": place} for place, text in zip(places, texts, strict=True)]
    notes[0]["text"] = f"<b>{texts[0]}</b>"
    figure.update_layout(annotations=notes)
    return figure


def _label(row: Any) -> str:
    """Return what stands beside a bar: what is still to gain there, in ms and of the sparse pass."""
    return f"{number(row.total)} ms, {percent(row.share)}{' in all' if 'more' in row.name else ''}"
