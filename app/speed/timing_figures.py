"""The figures of the Kernels page: time a layer, speedup against activity, timings over batches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from twell.app.ui.figures.plot_style import finish, layer_axis, layer_names, log_ticks, spans
from twell.app.ui.formatting import times
from twell.app.ui.theme import BLUE, GREY
from twell.workbench.run.schema import PREFILL
from twell.workbench.run.store import Run


def time_unit(most: float) -> tuple[str, float]:
    """The unit that the longest of some times reads best in, and what a microsecond is in it."""
    return ("µs", 1.0) if most < 10_000 else ("ms", 1e-3) if most < 10_000_000 else ("s", 1e-6)


def height(layers: int) -> int:
    """Of both figures that stand side by side, in pixels."""
    return 110 + max(20, min(34, 800 // max(layers, 1))) * max(layers, 6)


def dense_and_sparse(frame: pd.DataFrame, ratios: bool) -> go.Figure:
    """Two dots a layer, dense and sparse, joined; with `ratios`, dense / sparse at the right."""
    layers = [int(layer) for layer in frame["layer"]]
    unit, scale = time_unit(float(frame[["dense_us", "sparse_us"]].max().max()))
    frame = frame.assign(dense=frame["dense_us"] * scale, sparse=frame["sparse_us"] * scale)
    figure = go.Figure(
        go.Scatter(
            **spans(frame["dense"], frame["sparse"], layers),
            mode="lines",
            line={"color": GREY, "width": 1.5},
            opacity=0.6,
            hoverinfo="skip",
        )
    )
    looks: dict[str, dict[str, Any]] = {
        "dense": {"color": GREY, "size": 12, "symbol": "circle-open", "line": {"width": 2}},
        "sparse": {"color": BLUE, "size": 8},
    }
    for name, marker in looks.items():
        figure.add_scatter(
            x=frame[name],
            y=layers,
            mode="markers",
            marker=marker,
            hovertemplate=f"layer %{{y:.0f}}, {name}: %{{x:,.4g}} {unit}<extra></extra>",
        )
    high, low = (
        float(edge) for edge in (frame[["dense", "sparse"]].max().max(), frame[["dense", "sparse"]].min().min())
    )
    log = high > 20 * max(low, 1e-9)
    finish(figure, height(len(layers)), right=70 if ratios else 16, left=44, top=36)
    layer_axis(figure, layers)
    beside = {"xref": "paper", "xanchor": "left", "showarrow": False, "font": {"size": 12}}
    marks = (("○", GREY, "dense"), ("●", BLUE, "sparse"))
    names = "   ".join(
        f'<span style="color:{color};font-size:15px">{sign}</span> {name}' for sign, color, name in marks
    )
    notes = [{**beside, "text": names, "yref": "paper", "x": 0, "y": 1, "yshift": 22}]
    if ratios:
        notes += [{**beside, "text": times(r.speedup), "x": 1, "xshift": 8, "y": r.layer} for r in frame.itertuples()]
    figure.update_layout(annotations=notes)
    if log:
        ticks, text = log_ticks(low, high)
        figure.update_xaxes(type="log", tickvals=ticks, ticktext=text)
    else:
        figure.update_xaxes(range=[0, high * 1.06])
    figure.update_xaxes(title=f"{unit} per batch, median")
    return figure


def speedup_by_nnz(speedup: pd.DataFrame) -> go.Figure:
    """A dot a layer: mean nnz of the timed batches against dense time / sparse time."""
    frame = speedup[speedup["nnz_mean"] > 0].sort_values("nnz_mean")
    names, few = layer_names(frame["layer"]), len(frame) <= 16
    spread = math.log(frame["nnz_mean"].max() / frame["nnz_mean"].min() * 2)  # that the axis shows
    near = np.log(frame["nnz_mean"]).diff() < 0.05 * spread
    after = near.shift(-1, fill_value=False)
    beside = frame["speedup"].groupby((~near).cumsum()).transform("mean")
    below = frame["speedup"] < beside  # labels of close neighbours go to both sides, the slower one's under its dot
    figure = go.Figure(
        go.Scatter(
            x=frame["nnz_mean"],
            y=frame["speedup"],
            mode="markers+text",
            marker={"color": BLUE, "size": 8},
            text=[name if few or alone else "" for name, alone in zip(names, ~near & ~after, strict=True)],
            customdata=names,
            textposition=["bottom center" if b else "top center" for b in below],
            textfont={"size": 11},
            hovertemplate="%{customdata}: mean nnz %{x:.3g}, %{y:.3g} × dense<extra></extra>",
        )
    )
    finish(figure, min(height(len(frame)), 440), top=36)
    figure.add_hline(y=1, line={"color": GREY, "width": 1, "dash": "dot"})
    figure.add_annotation(
        text="as fast as dense",
        xref="paper",
        x=0,
        xanchor="left",
        y=1,
        yanchor="bottom",
        showarrow=False,
        font={"size": 11, "color": GREY},
    )
    low, high = float(frame["nnz_mean"].min()), float(frame["nnz_mean"].max())
    ticks, text = log_ticks(low / 1.4, high * 1.4)
    figure.update_xaxes(
        type="log",
        title="mean nnz of the timed batches, neurons",
        tickvals=ticks,
        ticktext=text,
        range=[math.log10(low / 1.4), math.log10(high * 1.4)],
    )
    figure.update_yaxes(title="speedup, × dense", range=[0, max(1.15, float(frame["speedup"].max()) * 1.15)])
    return figure


def batch_times(run: Run) -> pd.DataFrame:
    """Each layer's FFN in each timed batch, dense and sparse, prefill alone. Columns: batch, layer, op, tokens (of the
    batch), microseconds, nnz_mean, kernel."""
    rows = run.frame("timings")
    rows = rows[rows["op"].isin(["ffn_dense", "ffn_sparse"]) & (rows["layer"] >= 0) & (rows["phase"] == PREFILL)]
    rows = rows.sort_values(["batch", "layer", "op"], ignore_index=True)
    return rows[["batch", "layer", "op", "tokens", "microseconds", "nnz_mean", "kernel"]]


def summed(frame: pd.DataFrame, layer: int | None = None) -> pd.DataFrame:
    """Times (of batch_times) of one layer, or of all together: of the first time that each was timed, of the second,
    and so on, as far as all were, brought to the largest of their batches. Columns: batch (the last of them); op
    (dense, sparse); tokens; microseconds."""
    part = frame if layer is None else frame[frame["layer"] == layer]
    part = part.assign(turn=part.groupby(["layer", "op"]).cumcount())
    most = part.groupby(["turn", "op"])["tokens"].transform("max")
    part["microseconds"] *= most / part["tokens"].clip(lower=1)
    turns = part.groupby(["turn", "op"], as_index=False)
    sums = turns.agg(batch=("batch", "max"), tokens=("tokens", "max"), microseconds=("microseconds", "sum"))
    whole = turns["layer"].nunique()["layer"] == part["layer"].nunique()
    sums = sums[whole].drop(columns="turn")
    return sums.assign(op=sums["op"].str.removeprefix("ffn_"))[["batch", "op", "tokens", "microseconds"]]


def over_batches(timings: pd.DataFrame) -> go.Figure:
    """Sparse and dense time a token by batch number; `timings` has batch, op, tokens, microseconds."""
    figure = go.Figure()
    timings = timings.assign(time=timings["microseconds"] / timings["tokens"].clip(lower=1))
    unit, scale = ("ns", 1e3) if float(timings["time"].max()) < 1 else time_unit(float(timings["time"].max()))
    timings["time"] *= scale
    last, notes = timings["batch"].max(), []
    for op, color in (("dense", GREY), ("sparse", BLUE)):
        part = timings[timings["op"] == op].sort_values("batch")
        if not len(part):
            continue
        figure.add_scatter(
            x=part["batch"],
            y=part["time"],
            mode="lines+markers",
            line={"color": color, "width": 1.5},
            marker={"size": 5},
            customdata=part["tokens"],
            hovertemplate=f"batch %{{x}}, %{{customdata:,}} tokens, {op}: %{{y:,.4g}} {unit} per token<extra></extra>",
        )
        note = {
            "text": f'<span style="color:{color}">{op}</span>',
            "x": part["batch"].iloc[-1],
            "y": part["time"].iloc[-1],
            "xanchor": "left",
            "xshift": 8,
        }
        notes.append({**note, "showarrow": False, "font": {"size": 12}})
    finish(figure, 260, right=64)
    figure.update_layout(annotations=notes)
    figure.update_xaxes(title="batch", range=[-0.5, float(np.nan_to_num(last)) * 1.02 + 0.5], showgrid=False)
    figure.update_yaxes(title=f"{unit} per token", rangemode="tozero")
    return figure
