"""Figures of tables by layer, by position and by loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from twell.analysis.figures.labels import fixed
from twell.analysis.figures.table_plots.base import FEW, INK, SECOND, add_ratios, empty, layer_axis, varied
from twell.workbench.errors import Missing

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

STARTS = {"all": "all starts", "cut": "within a document", "document": "of a document"}  # of first_positions, in words


def layers(table: pd.DataFrame) -> Figure:
    """Draw by_layer: the median with the span from the tenth to the ninetieth percentile, and the mean."""
    figure = empty("layer", "nnz, neurons a token", **layer_axis(table))
    reach = {"array": table["p90"] - table["p50"], "arrayminus": table["p50"] - table["p10"], "color": INK}
    figure.add_bar(x=table["layer"], y=table["p50"], error_y=reach, name="median, p10 to p90", marker_color="#a9c3dd")
    figure.add_scatter(x=table["layer"], y=table["mean"], name="mean", mode="markers", marker_color=SECOND)
    return figure


def positions(table: pd.DataFrame) -> Figure:
    """Draw position_blocks: mean nnz over the layer's own, by layer and block of positions."""
    wide = table.pivot(index="layer", columns="position_from", values="relative")
    last = table.groupby("position_from")["position_to"].max()
    names = [str(a) if a == b else f"{a}–{b}" for a, b in last.items()]
    figure = empty("position", "layer", xaxis_type="category", **layer_axis(table, "y"))
    bar = {"title": "× layer mean,<br>2 and more"}
    figure.add_heatmap(z=wide.to_numpy(), x=names, y=wide.index, colorscale="RdBu_r", zmin=0, zmax=2, colorbar=bar)
    return figure


def surprisal(table: pd.DataFrame) -> Figure:
    """Draw surprisal: mean nnz over the layer's own by the loss of the next token, a line a layer."""
    figure = empty("loss of the next token, nats", "nnz, × layer mean")
    for layer, rows in table.groupby("layer"):
        mean = (rows["nnz_mean"] * rows["tokens"]).sum() / rows["tokens"].sum()
        middle = (rows["loss_low"] + rows["loss_high"]) / 2
        figure.add_scatter(x=middle, y=rows["nnz_mean"] / (mean or 1), name=f"layer {layer}", mode="lines")
    return figure


def within(table: pd.DataFrame) -> Figure:
    """Draw surprisal_within: the correlation within tokens by layer, with its interval."""
    varied(table["pearson"])
    figure = empty("layer", "correlation with the next token's loss, within tokens", **layer_axis(table))
    reach = {"array": table["high"] - table["pearson"], "arrayminus": table["pearson"] - table["low"], "color": INK}
    figure.add_scatter(x=table["layer"], y=table["pearson"], error_y=reach, mode="markers", marker_color=INK)
    figure.add_hline(y=0, line_dash="dot")
    return figure


def expected(table: pd.DataFrame) -> Figure:
    """Draw entropy_correlation: the rank correlations of nnz by layer, with their intervals."""
    varied(table["spearman"])
    figure = empty("layer", "rank correlation with nnz", **layer_axis(table))
    add_ratios(figure, table.rename(columns={"spearman": "ratio"}), "low", "high", "of", {})
    figure.add_hline(y=0, line_dash="dot")
    return figure


def origins(table: pd.DataFrame) -> Figure:
    """Draw by_source or by_phase: mean nnz over that of all others by layer. Missing of one alone, or without nnz."""
    name = str(table.columns[0])
    if not table["ratio"].notna().any() and table[name].nunique() > 1:
        raise Missing(f"No neuron fires on any {name}, so that there is no mean to compare with.")
    if not table["ratio"].notna().any():
        raise Missing(f"Every token is of one {name}, {table[name].iloc[0]}: there is none to compare it with.")
    figure = empty("layer", "nnz, × that of the others", **layer_axis(table))
    add_ratios(figure, table, "ratio_low", "ratio_high", name, {})
    figure.add_hline(y=1, line_dash="dot")
    return figure


def starts(table: pd.DataFrame) -> Figure:
    """Draw first_positions: position 0 over later ones by layer, of documents and of cuts apart."""
    figure = empty("layer", "position 0, × later positions", **layer_axis(table))
    add_ratios(figure, table, "low", "high", "start", STARTS)
    figure.add_hline(y=1, line_dash="dot")
    return figure


def depth(table: pd.DataFrame) -> Figure:
    """Draw across_layers: the rank correlation of nnz between layers."""
    varied(table["spearman"])
    grid = np.full(2 * [1 + table["other"].max()], np.nan)
    grid[table["layer"], table["other"]] = grid[table["other"], table["layer"]] = table["spearman"]
    figure = empty("layer", "layer", **layer_axis(table), **layer_axis(table, "y"))
    figure.add_heatmap(z=grid, colorscale="RdBu_r", zmin=-1, zmax=1, colorbar={"title": "Spearman"})
    if len(grid) <= FEW:  # more have no room for numbers in their cells
        text = [["" if np.isnan(value) else fixed(value) for value in row] for row in grid]
        figure.update_traces(text=text, texttemplate="%{text}", textfont_size=11, showscale=False)
    return figure


def gains(table: pd.DataFrame) -> Figure:
    """Draw layer_gains: speedup by mean nnz, a dot a layer, and the trend."""
    figure = empty("mean nnz", "dense over sparse time of the FFN")
    line = table.sort_values("nnz_mean")
    figure.add_scatter(x=line["nnz_mean"], y=line["expected"], name="trend", mode="lines", line_color="#999999")
    dots = {"mode": "markers+text", "textposition": "top center", "marker_color": SECOND}
    figure.add_scatter(x=table["nnz_mean"], y=table["speedup"], text=table["layer"], name="layer", **dots)
    figure.add_hline(y=1, line_dash="dot")
    return figure
