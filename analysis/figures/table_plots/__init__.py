"""Plots: the figures of the notebook and of the HTML page. Each function takes a table of the API and returns a plotly
figure.

    from twell.analysis import by_layer, plots
    plots.layers(by_layer(run)).show()

plotly is imported when the first figure is drawn, not before.
"""

from twell.analysis.figures.table_plots.base import dressed
from twell.analysis.figures.table_plots.by_layer import (
    depth,
    expected,
    gains,
    layers,
    origins,
    positions,
    starts,
    surprisal,
    within,
)
from twell.analysis.figures.table_plots.by_neuron import cache, clusters, dead, lags, lorenz
from twell.analysis.figures.table_plots.by_token import classes, covariates, identity, tokens

__all__ = [
    "cache",
    "classes",
    "clusters",
    "covariates",
    "dead",
    "depth",
    "dressed",
    "expected",
    "gains",
    "identity",
    "lags",
    "layers",
    "lorenz",
    "origins",
    "positions",
    "starts",
    "surprisal",
    "tokens",
    "within",
]
