"""Figures of the Compare page: two runs layer by layer, loss against sparsity of all runs over one text, trainings."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twell.analysis.activity.layers import by_layer
from twell.analysis.compare import compare_layers, compare_positions, compare_runs
from twell.analysis.figures.labels import interval, number, percent, signed, times
from twell.analysis.figures.small_multiples import small_multiples
from twell.analysis.figures.style import AMBER, BLUE, DOTTED, GREY, dots, finish, layer_axis, log_scale, spans
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

OTHERS = (AMBER, GREY, "#3a9e7d", "#a05fc4", "#c4504f")  # of trainings beside the one that is shown
MARKERS: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "size": 9},
    {"color": GREY, "size": 11, "symbol": "circle-open", "line": {"width": 2}},
)


def layers_of(runs: Sequence[Run]) -> pd.DataFrame:
    """Return `analysis.by_layer` of several runs, the last run first.

    Three more columns: run (0 for the last run, 1 for the one before it, …); name (the run's); depth (0 for the first
    layer of its model, 1 for the last).
    """
    frames = [by_layer(run).assign(run=index, name=run.name) for index, run in enumerate(reversed(runs))]
    frames = [frame.assign(depth=frame["layer"] / max(int(frame["layer"].max()), 1)) for frame in frames]
    return pd.concat(frames, ignore_index=True)


def position_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Return `analysis.compare_positions` as `small_multiples` draws it: the ratio of the runs by position.

    Args:
        frame: the rows of `analysis.compare_positions`; positions come in bands.

    Returns:
        The rows with a finite ratio, and more columns: position (the middle of the band); relative, low, high (the
        ratio with its interval); first (whether the band is position 0, in place of the first run's mean). `mean` is
        named mean_nnz. Raises Missing where none is above 0.
    """
    band = frame["band"].to_numpy(float)
    middle = np.where(band < 8, band, (band**2 + (band + 1) ** 2) / 16)
    ratios = frame.assign(position=np.maximum(middle, 0.5), first=band == 0, relative=frame["ratio"])
    for name in ("low", "high"):
        ratios[name] = frame[f"ratio_{name}"]
    ratios = ratios[np.isfinite(ratios["relative"]) & (frame["first"] > 0)]
    if not ratios["relative"].any():  # a logarithmic axis has no place for 0 alone
        raise Missing("One of these runs fires no neuron, so that their mean nnz has no ratio at any position.")
    return ratios.rename(columns={"mean": "mean_nnz"})


def measures(table: pd.DataFrame) -> dict[str, str]:
    """Return the columns of `layers_of` that both runs have, with the names of their panels."""
    both = {"mean": "mean nnz", "sparsity": "sparsity"}
    return both | ({"dead_share": "share of dead neurons"} if table["dead_share"].notna().all() else {})


def side_by_side(frame: pd.DataFrame, measures: dict[str, str]) -> go.Figure:
    """Return a panel a measure with both runs' values by layer, as two dots joined by a line; those of models of
    different depths by relative depth, which joins no two dots.

    Args:
        frame: the rows of `layers_of` two runs.
        measures: the columns to draw, each with its name on the axis.
    """
    figure = make_subplots(rows=1, cols=len(measures), shared_yaxes=True, horizontal_spacing=0.04)
    layers = sorted(int(layer) for layer in frame["layer"].unique())
    one_depth = frame.groupby("run")["layer"].max().nunique() == 1
    height = "layer" if one_depth else "depth"
    for column, (measure, name) in enumerate(measures.items(), start=1):
        wide = frame.pivot(index="layer", columns="run", values=measure)
        form = ".4~g" if measure == "mean" else ".4~%"
        if one_depth and {0, 1} <= set(wide.columns):
            joined = spans(wide[0], wide[1], wide.index, line={"color": GREY, "width": 1.5}, opacity=0.5)
            figure.add_trace(joined, row=1, col=column)
        for run, marker in enumerate(MARKERS):
            rows = frame[frame["run"] == run]
            figure.add_scatter(
                x=rows[measure],
                y=rows[height],
                mode="markers",
                marker=marker,
                cliponaxis=False,
                text=rows["name"] + ", layer " + rows["layer"].astype(str),
                hovertemplate=f"%{{text}}: {name} %{{x:{form}}}<extra></extra>",
                row=1,
                col=column,
            )
        mode = "normal" if measure == "sparsity" else "tozero"
        figure.update_xaxes(title=name, rangemode=mode, tickformat=form, row=1, col=column)
    finish(figure, 90 + max(18, min(34, 800 // max(len(layers), 1))) * max(len(layers), 4), left=44)
    if one_depth:
        layer_axis(figure, layers)
    else:
        figure.update_yaxes(tickvals=[0, 0.5, 1], ticktext=["first", "middle", "last"], range=[1.03, -0.03])
    return figure


def layer_labels(frame: pd.DataFrame) -> list[str]:
    """Return the names of layers that are compared: L3, or L3 / L11 where the first run's has another number."""
    pairs = zip(frame["layer"], frame["first_layer"], strict=True)
    return [f"L{layer}" if layer == first else f"L{layer} / L{first}" for layer, first in pairs]


def differences(frame: pd.DataFrame) -> go.Figure:
    """Return the difference of mean nnz by layer, in neurons per token, with 95 % intervals; the ratio at the right.

    Args:
        frame: the rows of `analysis.compare_layers`.
    """
    labels, places = layer_labels(frame), list(range(len(frame)))
    figure = go.Figure(
        dots(
            frame["difference"],
            places,
            frame["low"],
            frame["high"],
            text=[
                f"{label}: {signed(r.difference)}{interval(r.low, r.high, signed, '95 % ')}"
                for label, r in zip(labels, frame.itertuples(), strict=True)
            ],
            hovertemplate="%{text}<extra></extra>",
        )
    )
    left = 44 if (frame["layer"] == frame["first_layer"]).all() else 84
    finish(figure, 90 + max(18, min(34, 800 // max(len(places), 1))) * max(len(places), 4), left=left, right=76)
    layer_axis(figure, [int(layer) for layer in frame["layer"]], evenly=True)
    if left > 44:
        figure.update_yaxes(tickvals=places, ticktext=labels)
    figure.add_vline(x=0, line=DOTTED)
    at_right = {"xref": "paper", "xanchor": "left", "x": 1, "xshift": 8, "showarrow": False, "font": {"size": 12}}
    notes = [
        {**at_right, "text": times(ratio), "y": place} for place, ratio in zip(places, frame["ratio"], strict=True)
    ]
    figure.update_layout(annotations=notes)
    figure.update_xaxes(title="difference of mean nnz, neurons per token")
    return figure


def frontier(frame: pd.DataFrame, current: str) -> go.Figure:
    """Return a dot a run: its loss against the share of neurons that fire, with the FFN speedup in its label.

    Args:
        frame: the rows of `analysis.compare_runs`. Dots of the `best` runs are filled and joined by a line.
        current: the name of the run that is drawn in blue.
    """
    share = 1 - frame["sparsity"]
    best = frame["best"].fillna(False).to_numpy(bool)
    names = [html.escape(str(run)[:40]) for run in frame["run"]]
    speedups = [f" · {times(speedup)}" if pd.notna(speedup) else "" for speedup in frame["ffn_speedup"]]
    labels = [name + speedup for name, speedup in zip(names, speedups, strict=True)]
    figure = go.Figure()
    line = frame.assign(share=share)[best].sort_values("share")
    figure.add_scatter(
        x=line["share"],
        y=line["loss"],
        mode="lines",
        line={**DOTTED, "shape": "hv"},
        hoverinfo="skip",
    )
    figure.add_scatter(
        x=share,
        y=frame["loss"],
        mode="markers+text",
        marker={
            "color": [BLUE if run == current else GREY for run in frame["run"]],
            "size": 11,
            "symbol": ["circle" if is_best else "circle-open" for is_best in best],
            "line": {"width": 2},
        },
        text=_stacked(labels, share, frame["loss"]),
        textposition="top center",
        textfont={"size": 11},
        customdata=[
            f"{label}<br>loss {number(row.loss)} nats, nnz {number(row.nnz_mean)}, sparsity {percent(row.sparsity)}<br>"
            f"FFN {times(row.ffn_speedup)}, model {times(row.model_speedup)}"
            for label, row in zip(labels, frame.itertuples(), strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
        cliponaxis=False,
    )
    finish(figure, 340, top=36)
    figure.update_xaxes(title="share of neurons that fire", tickformat=".2~%", rangemode="normal")
    figure.update_yaxes(title="next-token loss, nats")
    for axis, values in ((figure.update_xaxes, share), (figure.update_yaxes, frame["loss"])):
        low, high = float(values.min()), float(values.max())
        margin = 0.18 * (high - low) or 0.05 * max(abs(high), 1e-9)
        axis(range=[low - margin, high + margin])
    return figure


def trainings_side_by_side(logs: pd.DataFrame, current: str) -> go.Figure:
    """Return four panels over the tokens trained on, a line a training: loss, nnz, dead share, tokens a second.

    Args:
        logs: the rows of `analysis.compare_trainings`.
        current: the name of the training that is drawn in blue.
    """
    panels = {"loss": "loss, nats", "nnz": "nnz", "dead": "silent neurons", "tokens_per_second": "tokens a second"}
    figure = make_subplots(rows=2, cols=2, horizontal_spacing=0.08, vertical_spacing=0.2)
    names = list(dict.fromkeys(logs["run"]))
    colours = {name: BLUE if name == current else OTHERS[index % len(OTHERS)] for index, name in enumerate(names)}
    for index, (column, title) in enumerate(panels.items()):
        for name in names:
            rows = logs[logs["run"] == name]
            figure.add_scatter(
                x=rows["tokens"],
                y=rows[column],
                mode="lines",
                name=name,
                legendgroup=name,
                showlegend=index == 0,
                line={"color": colours[name], "width": 2.2 if name == current else 1.5},
                hovertemplate=f"%{{x:,}} tokens: %{{y:.4g}}<extra>{html.escape(name)}</extra>",
                row=index // 2 + 1,
                col=index % 2 + 1,
            )
        figure.update_yaxes(title=title, row=index // 2 + 1, col=index % 2 + 1)
    finish(figure, 560, top=20)
    figure.update_xaxes(title="tokens trained on")
    figure.update_yaxes(**log_scale(logs["nnz"]), row=1, col=2)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(rangemode="tozero", row=2, col=2)
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    return figure


def _stacked(labels: list[str], *coordinates: pd.Series) -> list[str]:
    """Return the labels so that those of overlapping dots stand above one another, all at the first of the dots."""
    cells = [(values / max(float(np.ptp(values)) / 30, 1e-12)).round() for values in coordinates]
    index = pd.MultiIndex.from_arrays(cells)
    stacks = pd.Series(labels).groupby(index, sort=False).agg("<br>".join)
    return [stacks[cell] if is_first else "" for cell, is_first in zip(index, ~index.duplicated(), strict=True)]


def ratio_panels(frame: pd.DataFrame) -> go.Figure:
    """Return the ratio of two runs' mean nnz by position, a panel a layer. frame: the rows of `position_ratios`."""
    hover = [
        f"position about {number(r.position, 2)}<br>{times(r.relative)}{interval(r.low, r.high, times, '95 % ')}"
        for r in frame.itertuples()
    ]
    titles = dict(zip(frame["layer"].astype(int), layer_labels(frame), strict=True))
    frame = frame.assign(hover=hover)
    return small_multiples(frame, "position", titles, "position, tokens", "ratio of mean nnz", log=True, log_y=True)


def compared_layers(runs: Sequence[Run]) -> go.Figure:
    """Draw two runs layer by layer: mean nnz, sparsity, dead neurons; the last run filled. Page Compare."""
    table = layers_of(runs)
    return side_by_side(table, measures(table))


def layer_differences(runs: Sequence[Run]) -> go.Figure:
    """Draw the difference of two runs' mean nnz by layer, with intervals. Page Compare."""
    return differences(compare_layers(list(runs)))


def ratio_by_position(runs: Sequence[Run]) -> go.Figure:
    """Draw the ratio of two runs' mean nnz by position, a panel a layer. Page Compare."""
    return ratio_panels(position_ratios(compare_positions(list(runs))))


def loss_and_sparsity(runs: Sequence[Run]) -> go.Figure:
    """Draw loss against the share of neurons that fire, a dot a run, the last one marked. Page Compare."""
    return frontier(compare_runs(list(runs)), runs[-1].name)
