"""Timings of a capture as it goes: tables of them by time, and the figure of milliseconds above nnz."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twell.analysis.figures.style import WORDS, finish
from twell.workbench.run.schema import PREFILL
from twell.workbench.run.store import Run

POINTS = 240  # moments on the axis of time; batches in between are averaged
RECENT = 10.0  # seconds over which the rate is taken
SHADES = ((120, 175, 238), (30, 100, 190))  # of the first and the last layer: both are seen on white and on black


def sparse_calls(run: Run) -> pd.DataFrame:
    """Return the sparse calls by layer and time. Columns: seconds (since the capture began), layer, ms (of a batch of
    median size), nnz_mean, tokens (rows of that batch).

    Calls of batches under half that size are left out. Empty for a run of before such calls were timed one by one.
    """
    rows = run.frame("timings")
    rows = rows[(rows["op"] == "ffn_sparse") & (rows["phase"] == PREFILL) & rows["seconds"].notna()]
    size = float(rows["tokens"].median()) if len(rows) else 0.0
    rows = rows[2 * rows["tokens"] >= size]
    table = rows.assign(ms=rows["microseconds"] / 1000 * size / rows["tokens"], tokens=size)
    table = table[["seconds", "layer", "ms", "nnz_mean", "tokens"]].astype({"nnz_mean": "float64"})
    if table["seconds"].nunique() > POINTS:
        edges = np.linspace(table["seconds"].min(), table["seconds"].max(), POINTS + 1)
        place = np.clip(np.digitize(table["seconds"], edges) - 1, 0, POINTS - 1)
        table = table.groupby([place, "layer"], as_index=False).mean(numeric_only=True)
    return table.sort_values(["layer", "seconds"], ignore_index=True)


def no_calls() -> pd.DataFrame:
    """Return the table of `sparse_calls` of a capture that has timed none yet."""
    return pd.DataFrame({name: np.array([], float) for name in ("seconds", "layer", "ms", "nnz_mean", "tokens")})


def tokens_per_second(run: Run) -> float:
    """Return the rate of the last RECENT seconds, from the end of a pass to the end of the last one; NaN under two."""
    rows = run.frame("timings", ["op", "seconds", "tokens"])
    rows = rows[(rows["op"] == "pass") & rows["seconds"].notna()].sort_values("seconds")
    if len(rows) < 2:
        return np.nan
    since = rows["seconds"].iloc[-1] - RECENT
    first = min(int((rows["seconds"] < since).sum()), len(rows) - 2)
    took = rows["seconds"].iloc[-1] - rows["seconds"].iloc[first]
    return float(rows["tokens"].iloc[first + 1 :].sum() / took) if took > 0 else np.nan


def times_and_nnz(table: pd.DataFrame) -> go.Figure:
    """Return a line a layer of its sparse FFN's milliseconds, above one of its nnz, over one axis of time; axes alone
    for a table without rows."""
    layers = sorted(table["layer"].unique())
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06)
    for layer in layers:
        here = table[table["layer"] == layer]
        share = layers.index(layer) / max(1, len(layers) - 1)
        color = "rgb({}, {}, {})".format(*(round(a + share * (b - a)) for a, b in zip(*SHADES, strict=True)))
        line = {"color": color, "width": 1.5}
        for row, column, unit in ((1, "ms", "ms"), (2, "nnz_mean", "neurons")):
            hover = f"layer {layer}, %{{x:,.1f}} s: %{{y:,.3g}} {unit}<extra></extra>"
            shape = {"mode": "lines+markers" if len(here) < 40 else "lines", "marker": {"size": 4}, "line": line}
            figure.add_scatter(x=here["seconds"], y=here[column], hovertemplate=hover, row=row, col=1, **shape)
    finish(figure, 420, left=64, right=70)
    for row, column, title in ((1, "ms", "ms of a sparse FFN"), (2, "nnz_mean", "nnz of that call")):
        last = table[table["layer"].isin([*layers[:1], *layers[-1:]])].groupby("layer")[[column, "seconds"]].last()
        for layer, at in last.iterrows():
            where = {"x": at["seconds"], "y": at[column], "row": row, "col": 1}
            figure.add_annotation(
                text=f"L{layer}", xanchor="left", xshift=6, showarrow=False, font={"color": WORDS}, **where
            )
        figure.update_yaxes(title=title, rangemode="tozero", row=row, col=1)
    # One moment alone has no span: its axis would number billionths of a second.
    figure.update_xaxes(rangemode="tozero" if table["seconds"].nunique() == 1 else "normal")
    figure.update_xaxes(title="seconds since the capture began", row=2, col=1)
    return figure
