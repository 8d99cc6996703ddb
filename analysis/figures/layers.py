"""The figure of the Layers page: a row a layer with the distribution of nnz, the layer's share of it, and dead
neurons."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twell.analysis.activity.layers import by_layer, layer_histogram
from twell.analysis.activity.surprisal import surprisal
from twell.analysis.figures.labels import fixed, number, number_range, percent, whole
from twell.analysis.figures.small_multiples import small_multiples
from twell.analysis.figures.style import BLUE, GREY, ZERO, finish, layer_axis, panel_title, zero_log_axis
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

BINS = 43  # of nnz, at most; geometric, so that the lowest ones hold one count each
FOOT = 0.82  # of ZERO, and 1 over it: where a ridge begins beside the tokens that fire nothing


def nnz_bins(run: Run) -> pd.DataFrame:
    """Return the share of each layer's tokens by nnz, in bins of whole counts that are the same for all layers.

    Columns: layer; nnz_from, nnz_to (neurons, both inclusive); share (of the layer's tokens).
    """
    counts = layer_histogram(run)
    edges = np.unique(np.round(np.geomspace(1, float(counts["nnz"].max()) + 2, BINS + 1)).astype(int))
    starts = np.array([0, *edges[:-1]])
    ends = np.array([0, *(edges[1:] - 1)])
    index = np.searchsorted(starts, counts["nnz"], side="right") - 1
    sums = counts.groupby(["layer", index])["tokens"].sum().unstack(fill_value=0)
    sums = sums.reindex(columns=range(len(starts)), fill_value=0)
    shares = sums.div(sums.sum(axis=1).clip(lower=1), axis=0).rename_axis("bin", axis=1).stack().rename("share")
    bins = shares.reset_index()
    bins["nnz_from"], bins["nnz_to"] = starts[bins["bin"]], ends[bins["bin"]]
    return bins[["layer", "nnz_from", "nnz_to", "share"]]


def layer_rows(run: Run) -> pd.DataFrame:
    """Return `analysis.by_layer` with a column for each bin of `nnz_bins`, such as "nnz 4–5": its share of tokens."""
    bins = nnz_bins(run)
    names = ["nnz " + number_range(low, high) for low, high in zip(bins["nnz_from"], bins["nnz_to"], strict=True)]
    wide = bins.assign(name=names).pivot(index="layer", columns="name", values="share")
    table = by_layer(run).set_index("layer").join(wide[list(dict.fromkeys(names))])
    return table.reset_index()


def surprisal_bins(run: Run, of: Literal["next", "own"] = "next") -> pd.DataFrame:
    """Return `analysis.surprisal` relative to each layer's mean; layers without any nnz and empty bins are left out.

    Args:
        run: the run.
        of: whose loss: the prediction made at a token (next), or the token's own (own).

    Returns:
        The columns of `analysis.surprisal`, and: layer_mean (the layer's mean nnz over all bins); loss (nats, where the
        bin is drawn: its middle; for the last bin, which is open, its lower end); relative, low, high (mean nnz over
        layer_mean, with its 95 % interval, NaN where there is none). Raises Missing if no layer has any nnz.
    """
    frame = surprisal(run, of=of)
    tokens = frame["tokens"].groupby(frame["layer"]).sum()
    nnz_sum = (frame["nnz_mean"] * frame["tokens"]).groupby(frame["layer"]).sum()
    is_last = frame["bin"] == frame["bin"].max()
    middle = (frame["loss_low"] + frame["loss_high"]) / 2
    frame = frame.assign(
        layer_mean=frame["layer"].map(nnz_sum / tokens.clip(lower=1)), loss=middle.where(~is_last, frame["loss_low"])
    )
    frame = frame[(frame["layer_mean"] > 0) & (frame["tokens"] > 0)].reset_index(drop=True)
    if frame.empty:
        raise Missing(f"{run.name} fires no neuron on tokens that have a loss: nothing to compare the loss with.")
    ends = {name: frame[name] / frame["layer_mean"] for name in ("low", "high")}
    return frame.assign(relative=frame["nnz_mean"] / frame["layer_mean"], **ends)


def ridges(bins: pd.DataFrame, by_layer: pd.DataFrame) -> go.Figure:
    """Return a figure with a row a layer: the distribution of nnz, the mean and its share of the model's, dead neurons.

    Args:
        bins: the rows of `nnz_bins`.
        by_layer: the rows of `analysis.by_layer`. Without `dead_share` values, the panel of dead neurons is left out.
    """
    layers = [int(layer) for layer in by_layer["layer"]]
    has_dead = bool(by_layer["dead_share"].notna().any())
    widths = [0.62, 0.19, 0.19] if has_dead else [0.7, 0.3]
    figure = make_subplots(rows=1, cols=len(widths), shared_yaxes=True, column_widths=widths, horizontal_spacing=0.03)
    high = float(by_layer["max"].max()) or 100.0  # where nothing fires: its 0 stands at the left, as elsewhere
    curves = {layer: _density(rows) for layer, rows in bins.groupby("layer")}
    peak = max((float(y.max()) for _, y, _ in curves.values() if len(y)), default=1.0) or 1.0
    ridge: dict[str, list[Any]] = {
        "x": [],
        "y": [],
        "text": [],
    }  # one trace; each ridge begins and ends on its layer's line
    for layer in layers:
        x, y, tooltips = curves[layer]
        ridge["x"] += [x[0], *x, x[-1], None]
        ridge["y"] += [layer, *(layer - 1.5 * y / peak), layer, None]
        ridge["text"] += ["", *(f"layer {layer}<br>{text}" * bool(text) for text in tooltips), "", None]
    figure.add_scatter(
        **ridge,
        mode="lines",
        line={"color": BLUE, "width": 1.2},
        fill="toself",
        fillcolor="rgba(47, 126, 216, 0.22)",
        hoveron="points",
        hoverinfo="text",
        row=1,
        col=1,
    )
    _mark_means(figure, by_layer)
    _mark_used_means(figure, by_layer)
    labels = [
        number(mean) + (f" · {percent(share)}" if pd.notna(share) else "")  # none where nothing fires
        for mean, share in zip(by_layer["mean"], by_layer["share"], strict=True)
    ]
    _bars(figure, 2, layers, by_layer["mean"], labels, BLUE)
    if has_dead:
        _bars(figure, 3, layers, by_layer["dead_share"], [percent(v) for v in by_layer["dead_share"]], GREY)
    finish(figure, 100 + max(18, min(46, 900 // len(layers))) * len(layers), top=36, left=40)
    zero_log_axis(figure, high, "nnz of a token, neurons", row=1, col=1)
    layer_axis(figure, layers)
    figure.update_yaxes(range=[max(layers) + 0.6, min(layers) - 1.6])
    figure.update_yaxes(showgrid=False, col=2)
    figure.update_yaxes(showgrid=False, col=3)
    names = ("distribution over tokens, ● mean", "mean nnz · share of total", "dead neurons")[: len(widths)]
    notes = [panel_title(name, column, above=26) for column, name in enumerate(names, start=1)]
    figure.update_layout(annotations=notes)
    return figure


def _bars(figure: go.Figure, column: int, layers: list[int], values: pd.Series, labels: list[str], color: str) -> None:
    """Add a bar a layer to panel `column`, with its label at the end."""
    lengths = values.fillna(0).to_numpy(float)
    figure.add_bar(
        y=layers,
        x=lengths,
        orientation="h",
        marker={"color": color, "opacity": 0.75},
        width=0.5,
        text=labels,
        textposition="outside",
        cliponaxis=False,
        hovertemplate="layer %{y:.0f}: %{text}<extra></extra>",
        row=1,
        col=column,
    )
    label_room = 2.0 if column == 2 else 1.5  # × the longest bar
    figure.update_xaxes(
        range=[0, max(lengths.max(), 1e-9) * label_room],
        showticklabels=False,
        showgrid=False,
        row=1,
        col=column,
    )


def _mark_means(figure: go.Figure, by_layer: pd.DataFrame) -> None:
    """Add a dot at each layer's mean, with the quantiles in its tooltip."""
    figure.add_scatter(
        x=np.maximum(by_layer["mean"], ZERO),
        y=by_layer["layer"],
        mode="markers",
        marker={"color": BLUE, "size": 7},
        customdata=by_layer[["sd", "p10", "p50", "p90", "p99", "max"]],
        hovertemplate="layer %{y:.0f}: mean %{x:.4g}, sd %{customdata[0]:.3g}<br>p10 %{customdata[1]:.0f} · "
        "p50 %{customdata[2]:.0f} · p90 %{customdata[3]:.0f} · p99 %{customdata[4]:.0f} · max %{customdata[5]:.0f}"
        "<extra></extra>",
        row=1,
        col=1,
    )


def _mark_used_means(figure: go.Figure, by_layer: pd.DataFrame) -> None:
    """Add a ring at the mean number of neurons that the second ReLU, on the up branch, leaves; nothing without one."""
    if "used" not in by_layer or not by_layer["used"].notna().any():
        return
    figure.add_scatter(
        x=np.maximum(by_layer["used"], ZERO),
        y=by_layer["layer"],
        mode="markers",
        marker={"color": BLUE, "size": 9, "symbol": "circle-open", "line": {"width": 1.5}},
        hovertemplate="layer %{y:.0f}: %{x:.4g} with a nonzero product<extra></extra>",
        row=1,
        col=1,
    )


def _density(bins: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Return the ridge of one layer: x (nnz), y (share of tokens per unit of log nnz), and a tooltip for each point.

    Args:
        bins: the layer's rows of `nnz_bins`. The bin of nnz 0, the first, is drawn at ZERO.
    """
    low, high, share = (bins[name].to_numpy(float) for name in ("nnz_from", "nnz_to", "share"))
    low, high = low[1:], high[1:]
    widths = np.concatenate([[math.log(2)], np.log((high + 1) / low)])
    x = np.concatenate([[ZERO * FOOT, ZERO], np.sqrt(low * high)])
    y = np.concatenate([[0.0], share / widths])
    tooltips = [
        "",
        *(f"nnz {number_range(row.nnz_from, row.nnz_to)}: {percent(row.share)} of tokens" for row in bins.itertuples()),
    ]
    last = np.flatnonzero(y)[-1]  # the bin of the largest count; a point at no height follows it
    if last == 1:  # zeros alone: a peak on the 0 of the axis
        x[2] = ZERO / FOOT
    end = last + 2
    return x[:end], y[:end], tooltips[:end]


def surprisal_panels(frame: pd.DataFrame, correlation: pd.DataFrame) -> go.Figure:
    """Return mean nnz against loss, a panel a layer, under the layer's rank correlation.

    Args:
        frame: the rows of `surprisal_bins`.
        correlation: the rows of `analysis.surprisal_correlation`, of the same loss.
    """
    spearman = correlation.set_index("layer")["spearman"]
    hover = [
        f"loss {r.loss_low:.2f}–{r.loss_high:.2f} nats<br>mean nnz {number(r.nnz_mean)}, n = {whole(r.tokens)}"
        for r in frame.itertuples()
    ]
    titles = {layer: f"L{layer} · ρ {fixed(spearman.get(layer, float('nan')))}" for layer in frame["layer"].unique()}
    return small_multiples(frame.assign(hover=hover), "loss", titles, "loss, nats", "nnz / layer mean")
