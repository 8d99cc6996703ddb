"""Plots: the figures of the notebook and of the HTML page. Each function takes a table of the API and returns a plotly
figure.

    from twell.analysis import by_layer, plots
    plots.layers(by_layer(run)).show()

plotly is imported when the first figure is drawn, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

INK, SECOND = "#2f5d8a", "#c06a2d"
ENDS = 15  # tokens shown at each end of the ranking


def _figure(x: str, y: str, **layout: object) -> Figure:
    """Return an empty figure with these axis titles; layout: further entries of plotly's layout."""
    from plotly.graph_objects import Figure

    plain = {"template": "plotly_white", "height": 380, "margin": {"t": 30, "r": 20, "b": 50, "l": 60}}
    return Figure(layout={**plain, "xaxis_title": x, "yaxis_title": y, **layout})


def layers(table: pd.DataFrame) -> Figure:
    """Draw by_layer: the median with the span from the tenth to the ninetieth percentile, and the mean."""
    figure = _figure("layer", "nnz, neurons a token")
    reach = {"array": table["p90"] - table["p50"], "arrayminus": table["p50"] - table["p10"], "color": INK}
    figure.add_bar(x=table["layer"], y=table["p50"], error_y=reach, name="median, p10 to p90", marker_color="#a9c3dd")
    figure.add_scatter(x=table["layer"], y=table["mean"], name="mean", mode="markers", marker_color=SECOND)
    return figure


def positions(table: pd.DataFrame) -> Figure:
    """Draw position_blocks: mean nnz over the layer's own, by layer and block of positions."""
    wide = table.pivot(index="layer", columns="position_from", values="relative")
    last = table.groupby("position_from")["position_to"].max()
    names = [str(a) if a == b else f"{a}–{b}" for a, b in last.items()]
    figure = _figure("position", "layer", xaxis_type="category")
    bar = {"title": "× layer mean,<br>2 and more"}
    figure.add_heatmap(z=wide.to_numpy(), x=names, y=wide.index, colorscale="RdBu_r", zmin=0, zmax=2, colorbar=bar)
    return figure


def tokens(table: pd.DataFrame) -> Figure:
    """Draw by_token: the loudest and the quietest tokens by shrunk z, with its posterior interval."""
    ranked = table.sort_values("shrunk")
    ends = pd.concat([ranked.head(ENDS), ranked.iloc[max(ENDS, len(ranked) - ENDS) :]])
    names = [f"{text!r} ({token})" for text, token in zip(ends["text"], ends["token_id"], strict=True)]
    figure = _figure("z, shrunk", "", height=120 + 18 * len(ends), yaxis_type="category")
    figure.update_layout(margin_l=170)
    spread = {"array": 1.96 * ends["shrunk_se"], "color": INK}
    figure.add_scatter(x=ends["shrunk"], y=names, error_x=spread, mode="markers", marker_color=INK)
    return figure


def classes(table: pd.DataFrame) -> Figure:
    """Draw token_classes: mean z with its interval."""
    figure = _figure("z", "", yaxis_type="category")
    figure.update_layout(margin_l=150)
    spread = {"array": table["high"] - table["z"], "arrayminus": table["z"] - table["low"], "color": INK}
    figure.add_scatter(x=table["z"], y=table["class"], error_x=spread, mode="markers", marker_color=INK)
    return figure


def surprisal(table: pd.DataFrame) -> Figure:
    """Draw surprisal: mean nnz over the layer's own by the loss of the next token, a line a layer."""
    figure = _figure("loss of the next token, nats", "nnz, × layer mean")
    for layer, rows in table.groupby("layer"):
        mean = (rows["nnz_mean"] * rows["tokens"]).sum() / rows["tokens"].sum()
        middle = (rows["loss_low"] + rows["loss_high"]) / 2
        figure.add_scatter(x=middle, y=rows["nnz_mean"] / (mean or 1), name=f"layer {layer}", mode="lines")
    return figure


def lorenz(table: pd.DataFrame) -> Figure:
    """Draw lorenz: the share of firings by share of neurons, a line a layer."""
    figure = _figure("share of neurons, busiest first", "share of firings")
    for layer, rows in table.groupby("layer"):
        figure.add_scatter(x=rows["neurons"], y=rows["firings"], name=f"layer {layer}", mode="lines")
    return figure


def dead(table: pd.DataFrame) -> Figure:
    """Draw dead_curve: the share of neurons without a firing by sequences seen, a line a layer."""
    figure = _figure("sequences seen", "neurons without a firing", xaxis_type="log", yaxis_tickformat=".0%")
    for layer, rows in table.groupby("layer"):
        figure.add_scatter(x=rows["sequences"], y=rows["dead_share"], name=f"layer {layer}", mode="lines")
    return figure


def gains(table: pd.DataFrame) -> Figure:
    """Draw layer_gains: speedup by mean nnz, a dot a layer, and the trend."""
    figure = _figure("mean nnz", "dense over sparse time of the FFN")
    line = table.sort_values("nnz_mean")
    figure.add_scatter(x=line["nnz_mean"], y=line["expected"], name="trend", mode="lines", line_color="#999999")
    dots = {"mode": "markers+text", "textposition": "top center", "marker_color": SECOND}
    figure.add_scatter(x=table["nnz_mean"], y=table["speedup"], text=table["layer"], name="layer", **dots)
    figure.add_hline(y=1, line_dash="dot")
    return figure
