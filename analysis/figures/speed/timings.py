"""Figures of the Kernels page: time by layer, speedup against activity, times over the capture."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from twell.analysis.figures.labels import number, times
from twell.analysis.figures.style import (
    BLUE,
    DOTTED,
    GREY,
    finish,
    layer_axis,
    layer_names,
    log_axis,
    log_ticks,
    spans,
    whiskers,
)
from twell.workbench.errors import Missing
from twell.workbench.run.schema import PREFILL
from twell.workbench.run.store import Run


def time_unit(longest: float) -> tuple[str, float]:
    """Return the unit for times of up to `longest` µs, and the factor that turns µs into it."""
    return ("µs", 1.0) if longest < 1_000 else ("ms", 1e-3) if longest < 1_000_000 else ("s", 1e-6)


def figure_height(layers: int) -> int:
    """Return the height in pixels of a figure with a row for each of `layers` layers."""
    return 110 + max(20, min(34, 800 // max(layers, 1))) * max(layers, 6)


def dense_and_sparse(frame: pd.DataFrame, ratios: bool) -> go.Figure:
    """Return the dense and the sparse time of each layer as two dots, joined by a line.

    Args:
        frame: the rows of `analysis.speedup`.
        ratios: whether to write dense / sparse at the right of each layer, with its interval; grey where that does not
            tell it from dense.
    """
    layers = [int(layer) for layer in frame["layer"]]
    unit, scale = time_unit(float(frame[["dense_us", "sparse_us"]].max().max()))
    frame = frame.assign(dense=frame["dense_us"] * scale, sparse=frame["sparse_us"] * scale)
    figure = go.Figure(spans(frame["dense"], frame["sparse"], layers, line={"color": GREY, "width": 1.5}, opacity=0.6))
    markers: dict[str, dict[str, Any]] = {
        "dense": {"color": GREY, "size": 12, "symbol": "circle-open", "line": {"width": 2}},
        "sparse": {"color": BLUE, "size": 8},
    }
    for name, marker in markers.items():
        figure.add_scatter(
            x=frame[name],
            y=layers,
            mode="markers",
            marker=marker,
            hovertemplate=f"layer %{{y:.0f}}, {name}: %{{x:,.4g}} {unit}<extra></extra>",
        )
    all_times = frame[["dense", "sparse"]]
    low, high = float(all_times.min().min()), float(all_times.max().max())
    right = 132 if frame["low"].notna().any() else 70
    finish(figure, figure_height(len(layers)), right=right if ratios else 16, left=44, top=36)
    layer_axis(figure, layers)
    style = {"xref": "paper", "xanchor": "left", "showarrow": False, "font": {"size": 12}}
    marks = (("○", GREY, "dense"), ("●", BLUE, "sparse"))
    legend = "   ".join(
        f'<span style="color:{color};font-size:15px">{sign}</span> {name}' for sign, color, name in marks
    )
    notes = [{**style, "text": legend, "yref": "paper", "x": 0, "y": 1, "yshift": 22}]
    if ratios:
        notes += [{**style, "text": _ratio(row), "x": 1, "xshift": 8, "y": row.layer} for row in frame.itertuples()]
    figure.update_layout(annotations=notes)
    if high > 20 * max(low, 1e-9):
        ticks, labels = log_ticks(low, high)
        figure.update_xaxes(type="log", tickvals=ticks, ticktext=labels)
    else:
        figure.update_xaxes(range=[0, high * 1.06])
    figure.update_xaxes(title=f"{unit} per batch, median")
    return figure


def _ratio(row: Any) -> str:
    """Return what stands at the right of a layer: dense / sparse, and its interval where there is one."""
    if math.isnan(row.low):
        return times(row.speedup)
    text = f'{times(row.speedup)} <span style="font-size:10px">{number(row.low)}–{number(row.high)}</span>'
    return f'<span style="color:{GREY}">{text}</span>' if row.low <= 1 <= row.high else text


def speedup_by_nnz(speedup: pd.DataFrame) -> go.Figure:
    """Return a dot a layer: dense time / sparse time against the mean nnz of the timed batches.

    Args:
        speedup: the rows of `analysis.speedup`. Layers in which nothing fires are left out: the axis is logarithmic.

    Raises Missing where no layer is left.
    """
    frame = speedup[speedup["nnz_mean"] > 0].sort_values("nnz_mean")
    if frame.empty:
        raise Missing("No neuron fires in the timed batches: there is no nnz to draw the speedup against.")
    names = layer_names(frame["layer"])
    axis_span = math.log(frame["nnz_mean"].max() / frame["nnz_mean"].min() * 2)
    # Labels of close neighbours would overlap: the slower ones' go under their dots. With many layers they are hidden.
    is_close = np.log(frame["nnz_mean"]).diff() < 0.05 * axis_span  # to the layer before it
    is_alone = ~is_close & ~is_close.shift(-1, fill_value=False)
    cluster = (~is_close).cumsum()
    below = frame["speedup"] < frame["speedup"].groupby(cluster).transform("mean")
    show_all = len(frame) <= 16
    figure = go.Figure(
        go.Scatter(
            x=frame["nnz_mean"],
            y=frame["speedup"],
            error_y=whiskers(frame["low"], frame["speedup"], frame["high"], color=GREY),
            mode="markers+text",
            marker={"color": BLUE, "size": 8},
            text=[name if show_all or alone else "" for name, alone in zip(names, is_alone, strict=True)],
            customdata=names,
            textposition=_label_places(cluster, below),
            textfont={"size": 11},
            hovertemplate="%{customdata}: mean nnz %{x:.3g}, %{y:.3g} × dense<extra></extra>",
        )
    )
    finish(figure, min(figure_height(len(frame)), 440), top=36)
    figure.add_hline(y=1, line=DOTTED)
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
    log_axis(figure, low / 2, high * 1.4, "mean nnz of the timed batches, neurons")
    fastest = float(frame["speedup"].max())
    top = max(fastest, min(float(frame["high"].max()), 2 * fastest))  # NaN without intervals: `fastest` then
    figure.update_yaxes(title="speedup, × dense", range=[0, max(1.15, top * 1.15)])
    return figure


def _label_places(cluster: pd.Series, below: pd.Series) -> list[str]:
    """Return where the labels of dots stand, which come from left to right: at the right of their intervals, but the
    first of several neighbours at its left, and those between the first and the last on them.

    cluster: a number for each group of neighbours; below: whether a label goes under its dot
    """
    side = below.groupby([cluster, below])
    after, left = side.cumcount(), side.cumcount(ascending=False)
    across = np.where(left == 0, "right", np.where(after == 0, "left", "center"))
    return [f"{'bottom' if under else 'top'} {place}" for under, place in zip(below, across, strict=True)]


def batch_times(run: Run) -> pd.DataFrame:
    """Return the dense and sparse times of each layer's FFN in each timed batch of the prefill phase.

    Columns: batch; layer; op (ffn_dense, ffn_sparse); tokens (of the batch); microseconds; nnz_mean; kernel.
    """
    rows = run.frame("timings")
    rows = rows[rows["op"].isin(["ffn_dense", "ffn_sparse"]) & (rows["layer"] >= 0) & (rows["phase"] == PREFILL)]
    rows = rows.sort_values(["batch", "layer", "op"], ignore_index=True)
    return rows[["batch", "layer", "op", "tokens", "microseconds", "nnz_mean", "kernel"]]


def summed(frame: pd.DataFrame, layer: int | None = None) -> pd.DataFrame:
    """Return the rows of `batch_times` of one layer or, by default, summed over all layers.

    Layers are timed in batches of their own. So the first timings of all layers are added up, then the second, and so
    on until a layer has none left; each time is scaled, by the token, to the largest of the batches added up.

    Args:
        frame: the rows of `batch_times`.
        layer: the layer; None for the sum over all layers.

    Returns:
        Columns: batch (the last one added up); op (dense, sparse); tokens; microseconds.
    """
    rows = frame if layer is None else frame[frame["layer"] == layer]
    rows = rows.assign(round=rows.groupby(["layer", "op"]).cumcount())
    largest = rows.groupby(["round", "op"])["tokens"].transform("max")
    rows["microseconds"] *= largest / rows["tokens"].clip(lower=1)
    rounds = rows.groupby(["round", "op"], as_index=False)
    sums = rounds.agg(batch=("batch", "max"), tokens=("tokens", "max"), microseconds=("microseconds", "sum"))
    is_complete = rounds["layer"].nunique()["layer"] == rows["layer"].nunique()
    sums = sums[is_complete].drop(columns="round")
    return sums.assign(op=sums["op"].str.removeprefix("ffn_"))[["batch", "op", "tokens", "microseconds"]]


def over_batches(timings: pd.DataFrame) -> go.Figure:
    """Return dense and sparse time per token against the batch number.

    Args:
        timings: the rows of `summed`.
    """
    figure = go.Figure()
    timings = timings.assign(time=timings["microseconds"] / timings["tokens"].clip(lower=1))
    unit, scale = ("ns", 1e3) if float(timings["time"].max()) < 1 else time_unit(float(timings["time"].max()))
    timings["time"] *= scale
    last_batch, notes = timings["batch"].max(), []
    for op, color in (("dense", GREY), ("sparse", BLUE)):
        rows = timings[timings["op"] == op].sort_values("batch")
        if not len(rows):
            continue
        figure.add_scatter(
            x=rows["batch"],
            y=rows["time"],
            mode="lines+markers",
            line={"color": color, "width": 1.5},
            marker={"size": 5},
            customdata=rows["tokens"],
            hovertemplate=f"batch %{{x}}, %{{customdata:,}} tokens, {op}: %{{y:,.4g}} {unit} per token<extra></extra>",
        )
        note = {
            "text": f'<span style="color:{color}">{op}</span>',
            "x": rows["batch"].iloc[-1],
            "y": rows["time"].iloc[-1],
            "xanchor": "left",
            "xshift": 8,
        }
        notes.append({**note, "showarrow": False, "font": {"size": 12}})
    finish(figure, 260, right=64)
    figure.update_layout(annotations=notes)
    figure.update_xaxes(title="batch", range=[-0.5, float(np.nan_to_num(last_batch)) * 1.02 + 0.5], showgrid=False)
    figure.update_yaxes(title=f"{unit} per token", rangemode="tozero")
    return figure
