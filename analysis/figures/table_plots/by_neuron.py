"""Figures of tables of neurons."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from twell.analysis.figures.table_plots.base import by_depth, empty, log_across

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def lorenz(table: pd.DataFrame) -> Figure:
    """Draw lorenz: the share of firings by share of neurons, a line a layer."""
    figure = empty("share of neurons, busiest first", "share of firings")
    for layer, rows, color in by_depth(table):
        figure.add_scatter(x=rows["neurons"], y=rows["firings"], name=f"layer {layer}", mode="lines", line_color=color)
    return figure


def dead(table: pd.DataFrame) -> Figure:
    """Draw dead_curve: the share of neurons without a firing by sequences seen, a line a layer."""
    figure = empty("sequences seen", "neurons without a firing", yaxis_tickformat=".0%")
    log_across(figure, table["sequences"])
    for layer, rows, color in by_depth(table):
        look = {"mode": "lines", "line_color": color}
        figure.add_scatter(x=rows["sequences"], y=rows["dead_share"], name=f"layer {layer}", **look)
    return figure


def lags(table: pd.DataFrame) -> Figure:
    """Draw reuse: the share of firings in common by lag, a line a layer; dotted: with a token of another sequence."""
    figure = empty("tokens back", "share of firings in common", yaxis_tickformat=".0%")
    log_across(figure, table["lag"])
    for layer, rows, color in by_depth(table):
        later, other = rows[rows["lag"] > 0], rows[rows["lag"] == 0]
        figure.add_scatter(x=later["lag"], y=later["shared"], name=f"layer {layer}", mode="lines", line_color=color)
        for value in other["shared"]:
            line = {"color": color, "dash": "dot"}
            figure.add_scatter(x=later["lag"], y=[value] * len(later), mode="lines", line=line, showlegend=False)
    return figure


def cache(table: pd.DataFrame) -> Figure:
    """Draw reuse_cache: the share of firings that a cache serves by its neurons, a line a layer."""
    figure = empty("neurons in the cache", "share of firings served", yaxis_tickformat=".0%")
    log_across(figure, table["neurons"])
    for layer, rows, color in by_depth(table):
        look = {"mode": "lines+markers", "line_color": color}
        figure.add_scatter(x=rows["neurons"], y=rows["served"], text=rows["window"], name=f"layer {layer}", **look)
    return figure


def clusters(table: pd.DataFrame) -> Figure:
    """Draw firing_clusters: how many neurons each has and how they correlate, a dot a cluster."""
    figure = empty("neurons that fire together", "mean correlation of their firings")
    log_across(figure, table["neurons"])
    for layer, rows, color in by_depth(table):
        figure.add_scatter(x=rows["neurons"], y=rows["phi"], name=f"layer {layer}", mode="markers", line_color=color)
    return figure
