"""Figures of tables of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from twell.analysis.figures.table_plots.base import INK, SECOND, empty, layer_axis
from twell.analysis.statistics import t_half

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ENDS = 15  # tokens shown at each end of the ranking
COVARIATES = {  # of token_covariates, in words
    "log_count": "logarithm of its count",
    "begins_word": "begins a word",
    "has_letter": "has a letter",
    "characters": "characters",
    "surprisal_mean": "surprisal of itself",
}


def tokens(table: pd.DataFrame) -> Figure:
    """Draw by_token: the loudest and the quietest tokens by shrunk z, with its posterior interval."""
    ranked = table.sort_values("shrunk")
    ends = pd.concat([ranked.head(ENDS), ranked.iloc[max(ENDS, len(ranked) - ENDS) :]])
    names = [f"{text!r} ({token})" for text, token in zip(ends["text"], ends["token_id"], strict=True)]
    figure = empty("z, shrunk", "", height=120 + 18 * len(ends), yaxis_type="category")
    figure.update_layout(margin_l=170)
    spread = {"array": float(t_half(np.inf)) * ends["shrunk_se"], "color": INK}
    figure.add_scatter(x=ends["shrunk"], y=names, error_x=spread, mode="markers", marker_color=INK)
    return figure


def classes(table: pd.DataFrame) -> Figure:
    """Draw token_classes: mean z with its interval."""
    figure = empty("z", "", yaxis_type="category")
    figure.update_layout(margin_l=150)
    spread = {"array": table["high"] - table["z"], "arrayminus": table["z"] - table["low"], "color": INK}
    figure.add_scatter(x=table["z"], y=table["class"], error_x=spread, mode="markers", marker_color=INK)
    return figure


def identity(table: pd.DataFrame) -> Figure:
    """Draw token_identity: the share of the variance of nnz that the token explains, by layer."""
    figure = empty("layer", "variance of nnz that the token explains", yaxis_tickformat=".0%", **layer_axis(table))
    figure.add_bar(x=table["layer"], y=table["icc"], name="of more such text", marker_color="#a9c3dd")
    figure.add_scatter(x=table["layer"], y=table["explained"], name="of this run", mode="markers", marker_color=SECOND)
    return figure


def covariates(table: pd.DataFrame) -> Figure:
    """Draw token_covariates: the change of z for one sd more of each, with its interval."""
    figure = empty("change of z for one sd more", "", yaxis_type="category")
    figure.update_layout(margin_l=150)
    sd = table["standardised"] / table["coefficient"].where(table["coefficient"] != 0, np.nan)
    reach = {"array": (table["high"] - table["coefficient"]) * sd, "color": INK}
    names = table["covariate"].replace(COVARIATES)
    figure.add_scatter(x=table["standardised"], y=names, error_x=reach, mode="markers", marker_color=INK)
    figure.add_vline(x=0, line_dash="dot")
    return figure
