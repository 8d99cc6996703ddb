"""Figures of the studies: what sparsity costs in loss, and what it gains in speed."""

from __future__ import annotations

import html

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twell.analysis.figures.style import AMBER, BLUE, DOTTED, GREY, finish, log_ticks, panel_title
from twell.app.ui.formatting import SPACE, number, percent, times

SPEEDS = {  # column: its name at the line, and its look
    "cpu_ffn_speedup": ("FFN, CPU", {"color": AMBER, "symbol": "diamond"}),
    "ffn_speedup": ("FFN, GPU", {"color": BLUE, "symbol": "circle"}),
    "step_speedup": ("training step, GPU", {"color": GREY, "symbol": "triangle-up"}),
    "model_speedup": ("forward pass, GPU", {"color": BLUE, "symbol": "circle-open"}),
}
OWN = {"ffn_speedup": "FFN", "model_speedup": "forward pass"}  # of this run, on its own device: a GPU's or a CPU's
INK = "#3d8a63"  # of this run: the colors of the sweep say GPU or CPU
ABOVE = {"step_speedup": 7, "model_speedup": -7}  # pixels by which names that would meet are shifted


def cost_and_gain(table: pd.DataFrame) -> go.Figure:
    """Return two panels over the share of neurons that a token fires: what the loss rises by, and speedups.

    Args:
        table: the rows of `analysis.studies` of the sweep over L1, and this run, whose speeds are drawn as crosses.
    """
    sweep, own = table[~table["this_run"]], table[table["this_run"]]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.1)
    _rises(figure, sweep)
    for column, (name, look) in SPEEDS.items():
        _speeds(figure, sweep, column, name, look)
    _own_speeds(figure, own)
    shares = 1 - table["sparsity"]
    shares = shares[shares > 0]  # a logarithmic axis has no place for a run in which nothing fires
    low, high = shares.min() * 0.8, min(1.0, shares.max() * 1.4)
    ticks, names = log_ticks(100 * low, 100 * high)  # as percentages, without digits that a phone has no room for
    figure.update_xaxes(
        type="log",
        title="neurons that a token fires, share of a layer",
        tickvals=[tick / 100 for tick in ticks],
        ticktext=[f"{name}{SPACE}%" for name in names],
        range=[np.log10(low), np.log10(high)],
    )
    finish(figure, 340, top=36, right=110)
    figure.update_yaxes(tickformat="+.3~%", row=1, col=1)
    figure.update_yaxes(ticksuffix=" ×", row=1, col=2)
    figure.add_hline(y=1, line=DOTTED, row=1, col=2)
    titles = ("held-out loss over that without L1", "dense time over sparse time")
    for panel, title in enumerate(titles, start=1):
        figure.add_annotation(panel_title(title, panel))
    return figure


def _rises(figure: go.Figure, sweep: pd.DataFrame) -> None:
    """Add the rise of the loss: a dot a training, and a line through the mean of each L1."""
    means = sweep.assign(share=1 - sweep["sparsity"]).groupby("l1")[["share", "rise"]].mean().sort_values("share")
    figure.add_scatter(
        x=means["share"],
        y=means["rise"],
        mode="lines",
        line={"color": GREY, "width": 1},
        hoverinfo="skip",
        row=1,
        col=1,
    )
    figure.add_scatter(
        x=1 - sweep["sparsity"],
        y=sweep["rise"],
        mode="markers",
        marker={"color": BLUE, "size": 8},
        customdata=[
            f"{html.escape(str(row.name))}: L1 {row.l1:g}, seed {row.seed:.0f}<br>loss {row.loss:.4f} nats "
            f"({100 * row.rise:+.2f} %)<br>nnz {number(row.nnz)} of {row.d_ff:.0f}, sparsity {percent(row.sparsity)}"
            for row in sweep.itertuples(index=False)
        ],
        hovertemplate="%{customdata}<extra></extra>",
        row=1,
        col=1,
    )
    for l1, mean in means.iterrows():
        where = {"x": float(np.log10(mean["share"])), "y": mean["rise"], "xref": "x", "yref": "y"}
        figure.add_annotation(
            **where, text=f"L1 {l1:g}", showarrow=False, yshift=14, xanchor="left", font={"size": 11, "color": GREY}
        )


def _speeds(figure: go.Figure, sweep: pd.DataFrame, column: str, name: str, look: dict[str, str]) -> None:
    """Add one kind of speedup to the second panel, its name at its sparsest end; nothing where it was not measured."""
    known = sweep[sweep[column].notna()].sort_values("sparsity", ascending=False)
    if known.empty:
        return
    figure.add_scatter(
        x=1 - known["sparsity"],
        y=known[column],
        mode="lines+markers",
        line={"color": look["color"], "width": 1},
        marker={**look, "size": 8},
        customdata=[f"{name}: {times(value)}, nnz {number(nnz)}" for value, nnz in known[[column, "nnz"]].to_numpy()],
        hovertemplate="%{customdata}<extra></extra>",
        row=1,
        col=2,
    )
    last = known.iloc[-1]
    figure.add_annotation(
        x=float(np.log10(1 - last["sparsity"])),
        y=last[column],
        xref="x2",
        yref="y2",
        text=name,
        showarrow=False,
        xanchor="left",
        xshift=8,
        yshift=ABOVE.get(column, 0),
        font={"size": 11, "color": look["color"]},
    )


def _own_speeds(figure: go.Figure, own: pd.DataFrame) -> None:
    """Add this run's speedups to the second panel, each a cross with its name, as two crosses alone look alike."""
    for column, name in OWN.items():
        here = own[own[column].notna()] if column in own else own.iloc[:0]
        if here.empty:
            continue
        figure.add_scatter(
            x=1 - here["sparsity"],
            y=here[column],
            mode="markers+text",
            marker={"color": INK, "symbol": "x", "size": 9},
            text=[f"this run, {name}"] * len(here),
            textposition="middle left",
            textfont={"size": 11, "color": INK},
            customdata=[f"{html.escape(str(row))}, this run: {name}" for row in here["name"]],
            hovertemplate="%{customdata} %{y:.2f} ×<extra></extra>",
            row=1,
            col=2,
        )
