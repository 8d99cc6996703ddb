"""Plots: the figures of the notebook and of the HTML page. Each function takes a table of the API and returns a plotly
figure.

    from twell.analysis import by_layer, plots
    plots.layers(by_layer(run)).show()

plotly is imported when the first figure is drawn, not before.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from twell.analysis.statistics import t_half
from twell.workbench.errors import Missing

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

INK, SECOND = "#2f5d8a", "#c06a2d"
COLORS = ("#2f5d8a", "#c06a2d", "#4a7c59", "#8a4f7d", "#7a7a7a", "#b59f3b", "#3f8f8f", "#a13d3d")
OTHER_COLORS = ("#4a9c72", "#a06cc0", "#c75c6a", "#3f9aa8", "#8a7a3b")  # of a dressed figure, after the page's own
BARS = "rgba(47, 126, 216, 0.36)"
HEIGHT, LEGEND = 360, 110  # pixels of a dressed figure, and for the names at its right
ENDS = 15  # tokens shown at each end of the ranking
FEW = 16  # layers, of which each has its number on an axis


def _figure(x: str, y: str, **layout: object) -> Figure:
    """Return an empty figure with these axis titles; layout: further entries of plotly's layout."""
    from plotly.graph_objects import Figure

    plain = {"template": "plotly_white", "height": 380, "margin": {"t": 30, "r": 20, "b": 50, "l": 60}}
    return Figure(layout={**plain, "xaxis_title": x, "yaxis_title": y, **layout})


def _step(table: pd.DataFrame) -> int | None:
    """Return the step between numbers on an axis of layers: 1 for few, which would have halves numbered too."""
    return 1 if table["layer"].max() < FEW else None


def _varied(values: pd.Series) -> None:
    """Raise Missing where no correlation has a value: axes alone would not say why."""
    if values.isna().all():
        raise Missing("What they correlate does not vary in this run.")


def layers(table: pd.DataFrame) -> Figure:
    """Draw by_layer: the median with the span from the tenth to the ninetieth percentile, and the mean."""
    figure = _figure("layer", "nnz, neurons a token", xaxis_dtick=_step(table))
    reach = {"array": table["p90"] - table["p50"], "arrayminus": table["p50"] - table["p10"], "color": INK}
    figure.add_bar(x=table["layer"], y=table["p50"], error_y=reach, name="median, p10 to p90", marker_color="#a9c3dd")
    figure.add_scatter(x=table["layer"], y=table["mean"], name="mean", mode="markers", marker_color=SECOND)
    return figure


def positions(table: pd.DataFrame) -> Figure:
    """Draw position_blocks: mean nnz over the layer's own, by layer and block of positions."""
    wide = table.pivot(index="layer", columns="position_from", values="relative")
    last = table.groupby("position_from")["position_to"].max()
    names = [str(a) if a == b else f"{a}–{b}" for a, b in last.items()]
    figure = _figure("position", "layer", xaxis_type="category", yaxis_dtick=_step(table))
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
    spread = {"array": float(t_half(np.inf)) * ends["shrunk_se"], "color": INK}
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


def _add_ratios(figure: Figure, rows: pd.DataFrame, low: str, high: str, of: str, names: dict[str, str]) -> None:
    """Add a dot a layer at column `ratio` for each value of a column, side by side, with their intervals.

    Args:
        figure: the figure.
        rows: the table.
        low, high: the columns of the interval.
        of: the column that tells the dots of a layer apart.
        names: its values in words.
    """
    groups = list(rows[rows["layer"] >= 0].groupby(of))
    for index, (value, part) in enumerate(groups):
        reach = {"array": part[high] - part["ratio"], "arrayminus": part["ratio"] - part[low]}
        beside = part["layer"] + BESIDE * (index - (len(groups) - 1) / 2)
        figure.add_scatter(
            x=beside,
            y=part["ratio"],
            error_y=reach,
            name=names.get(str(value), str(value)),
            mode="markers",
            customdata=part["layer"],
            hovertemplate="layer %{customdata}: %{y:.3g}",
        )


def origins(table: pd.DataFrame) -> Figure:
    """Draw by_source or by_phase: mean nnz over that of all others by layer. Missing of one alone, or without nnz."""
    name = str(table.columns[0])
    if not table["ratio"].notna().any() and table[name].nunique() > 1:
        raise Missing(f"No neuron fires on any {name}, so that there is no mean to compare with.")
    if not table["ratio"].notna().any():
        raise Missing(f"Every token is of one {name}, {table[name].iloc[0]}: there is none to compare it with.")
    figure = _figure("layer", "nnz, × that of the others", xaxis_dtick=_step(table))
    _add_ratios(figure, table, "ratio_low", "ratio_high", name, {})
    figure.add_hline(y=1, line_dash="dot")
    return figure


BESIDE = 0.16  # layers between dots of one layer
STARTS = {"all": "all starts", "cut": "within a document", "document": "of a document"}  # of first_positions, in words


def starts(table: pd.DataFrame) -> Figure:
    """Draw first_positions: position 0 over later ones by layer, of documents and of cuts apart."""
    figure = _figure("layer", "position 0, × later positions", xaxis_dtick=_step(table))
    _add_ratios(figure, table, "low", "high", "start", STARTS)
    figure.add_hline(y=1, line_dash="dot")
    return figure


def within(table: pd.DataFrame) -> Figure:
    """Draw surprisal_within: the correlation within tokens by layer, with its interval."""
    _varied(table["pearson"])
    figure = _figure("layer", "correlation with the next token's loss, within tokens", xaxis_dtick=_step(table))
    reach = {"array": table["high"] - table["pearson"], "arrayminus": table["pearson"] - table["low"], "color": INK}
    figure.add_scatter(x=table["layer"], y=table["pearson"], error_y=reach, mode="markers", marker_color=INK)
    figure.add_hline(y=0, line_dash="dot")
    return figure


def expected(table: pd.DataFrame) -> Figure:
    """Draw entropy_correlation: the rank correlations of nnz by layer, with their intervals."""
    _varied(table["spearman"])
    figure = _figure("layer", "rank correlation with nnz", xaxis_dtick=_step(table))
    _add_ratios(figure, table.rename(columns={"spearman": "ratio"}), "low", "high", "of", {})
    figure.add_hline(y=0, line_dash="dot")
    return figure


def identity(table: pd.DataFrame) -> Figure:
    """Draw token_identity: the share of the variance of nnz that the token explains, by layer."""
    figure = _figure(
        "layer", "variance of nnz that the token explains", yaxis_tickformat=".0%", xaxis_dtick=_step(table)
    )
    figure.add_bar(x=table["layer"], y=table["icc"], name="of more such text", marker_color="#a9c3dd")
    figure.add_scatter(x=table["layer"], y=table["explained"], name="of this run", mode="markers", marker_color=SECOND)
    return figure


COVARIATES = {  # of token_covariates, in words
    "log_count": "logarithm of its count",
    "begins_word": "begins a word",
    "has_letter": "has a letter",
    "characters": "characters",
    "surprisal_mean": "surprisal of itself",
}


def covariates(table: pd.DataFrame) -> Figure:
    """Draw token_covariates: the change of z for one sd more of each, with its interval."""
    figure = _figure("change of z for one sd more", "", yaxis_type="category")
    figure.update_layout(margin_l=150)
    sd = table["standardised"] / table["coefficient"].where(table["coefficient"] != 0, np.nan)
    reach = {"array": (table["high"] - table["coefficient"]) * sd, "color": INK}
    names = table["covariate"].replace(COVARIATES)
    figure.add_scatter(x=table["standardised"], y=names, error_x=reach, mode="markers", marker_color=INK)
    figure.add_vline(x=0, line_dash="dot")
    return figure


def depth(table: pd.DataFrame) -> Figure:
    """Draw across_layers: the rank correlation of nnz between layers."""
    _varied(table["spearman"])
    grid = np.full(2 * [1 + table["other"].max()], np.nan)
    grid[table["layer"], table["other"]] = grid[table["other"], table["layer"]] = table["spearman"]
    figure = _figure("layer", "layer", xaxis_dtick=_step(table), yaxis_dtick=_step(table))
    figure.add_heatmap(z=grid, colorscale="RdBu_r", zmin=-1, zmax=1, colorbar={"title": "Spearman"})
    return figure


def lags(table: pd.DataFrame) -> Figure:
    """Draw reuse: the share of firings in common by lag, a line a layer; dotted: with a token of another sequence."""
    figure = _figure("tokens back", "share of firings in common", xaxis_type="log", yaxis_tickformat=".0%")
    for number, (layer, rows) in enumerate(table.groupby("layer")):
        later, other = rows[rows["lag"] > 0], rows[rows["lag"] == 0]
        color = COLORS[number % len(COLORS)]
        figure.add_scatter(x=later["lag"], y=later["shared"], name=f"layer {layer}", mode="lines", line_color=color)
        for value in other["shared"]:
            line = {"color": color, "dash": "dot"}
            figure.add_scatter(x=later["lag"], y=[value] * len(later), mode="lines", line=line, showlegend=False)
    return figure


def cache(table: pd.DataFrame) -> Figure:
    """Draw reuse_cache: the share of firings that a cache serves by its neurons, a line a layer."""
    figure = _figure("neurons in the cache", "share of firings served", xaxis_type="log", yaxis_tickformat=".0%")
    for layer, rows in table.groupby("layer"):
        figure.add_scatter(
            x=rows["neurons"], y=rows["served"], text=rows["window"], name=f"layer {layer}", mode="lines+markers"
        )
    return figure


def clusters(table: pd.DataFrame) -> Figure:
    """Draw firing_clusters: how many neurons each has and how they correlate, a dot a cluster."""
    figure = _figure("neurons that fire together", "mean correlation of their firings", xaxis_type="log")
    for layer, rows in table.groupby("layer"):
        figure.add_scatter(x=rows["neurons"], y=rows["phi"], name=f"layer {layer}", mode="markers")
    return figure


def dressed(figure: Figure) -> Figure:
    """Return a figure of a table in the dashboard's style: no background, its colors, names at the right."""
    from twell.analysis.figures.style import AMBER, BLUE, DOTTED, GREY, finish  # which load plotly

    left, height = figure.layout.margin.l or 56, figure.layout.height or HEIGHT
    named = len([trace for trace in figure.data if trace.name and trace.showlegend is not False]) > 1
    figure.layout.template = None
    finish(figure, min(height, 520), left=max(int(left), 72), right=LEGEND if named else 16)
    figure.update_layout(showlegend=named)
    figure.update_yaxes(title_standoff=22)  # beside the numbers, not on them
    colors = cycle((BLUE, AMBER, GREY, *OTHER_COLORS))
    for trace in figure.data:
        if trace.type == "heatmap":
            trace.update(
                colorscale=[[0.0, AMBER], [0.5, "rgba(139, 149, 161, 0.06)"], [1.0, BLUE]],
                colorbar={"thickness": 10, "outlinewidth": 0},
            )
            figure.update_xaxes(showgrid=False)
            figure.update_yaxes(showgrid=False, autorange="reversed")
            continue
        color = trace.line.color if trace.type == "scatter" and trace.line.color else next(colors)
        trace.update(marker_color=BARS if trace.type == "bar" else color)
        if trace.type == "scatter":
            trace.update(line_color=color)
            for axis in ("error_x", "error_y"):
                if trace[axis].array is not None:
                    trace.update({axis: {"color": color, "width": 0, "thickness": 1.4}})
    figure.update_shapes(line=DOTTED)
    return figure
