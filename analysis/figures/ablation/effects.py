"""The figures of page What matters: changes of the loss by what is left, by layer, and by neuron."""

from __future__ import annotations

from itertools import product

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from twell.analysis.ablations.allocation import allocation
from twell.analysis.ablations.by_condition import ablate_command, by_tokens, effects
from twell.analysis.figures.labels import percent, plural
from twell.analysis.figures.neurons import density_label
from twell.analysis.figures.style import AMBER, BLUE, GREY, WORDS, dots, finish, finish_layers, log_ticks, whiskers
from twell.analysis.neurons.effects import neuron_effects
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

# By kind: its colour, the line's pattern and its name beside the line.
CURVES = {
    "weakest": (BLUE, "solid", "weakest firings away"),
    "smallest": (BLUE, "dot", "smallest values away"),
    "scattered": (GREY, "dot", "firings away at random"),
    "rarest": (AMBER, "solid", "rarest neurons away"),
    "busiest": (AMBER, "dash", "busiest neurons away"),
    "random": (GREY, "solid", "neurons away at random"),
}
SYMBOLS = ("circle", "diamond-open", "square-open", "cross-open")  # of the sets of tokens, the newest first
MOST = 4000  # neurons drawn


def curve_rows(run: Run) -> pd.DataFrame:
    """Return the rows of `effects` that are curves: conditions of all layers with a share."""
    table = effects(run)
    rows = table[table["kind"].isin(list(CURVES)) & (table["layer"] < 0)]
    if rows.empty:
        raise Missing(f"{run.name} has no shares that were taken away: measure some with `{ablate_command(run)}`.")
    return rows.reset_index(drop=True)


def curve_sets(rows: pd.DataFrame) -> list[pd.DataFrame]:
    """Return the rows of `curve_rows` by the tokens they were measured on, the newest study's first."""
    return sorted(by_tokens(rows), key=lambda same: -int(same["study"].max()))


def of_tokens(rows: pd.DataFrame, number: int) -> pd.DataFrame:
    """Return one set of `curve_sets`, by its number from 0."""
    return curve_sets(rows)[number]


def layer_rows(run: Run) -> pd.DataFrame:
    """Return the rows of `effects` in which a layer's FFN was away."""
    table = effects(run)
    rows = table[table["kind"] == "ffn"].sort_values("layer")
    if rows.empty:
        raise Missing(f"{run.name} has no layer that was taken away: measure it with `{ablate_command(run)}`.")
    return rows.reset_index(drop=True)


def loss_by_share(rows: pd.DataFrame) -> go.Figure:
    """Return a line a kind: change of the loss against the share of firings that is left, with intervals.

    Args:
        rows: those of `curve_rows`. No line goes over points of different tokens: each set has lines of its own.
    """
    figure = go.Figure()
    sets = curve_sets(rows)
    for (kind, (colour, dash, name)), (number, same) in product(CURVES.items(), enumerate(sets)):
        line = same[same["kind"] == kind].sort_values("kept")
        if line.empty:
            continue
        texts = [
            f"{row.condition}: {row.change:+.4f} nats "
            + (f"[{row.low:+.4f}, {row.high:+.4f}]" if row.low == row.low else "[too few documents]")
            for row in line.itertuples()
        ]
        of = f", on {plural(int(line['tokens'].iloc[0]), 'token')}" if len(sets) > 1 else ""
        figure.add_scatter(
            x=100 * line["kept"],
            y=line["change"],
            error_y=whiskers(line["low"], line["change"], line["high"]),
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 1.8},
            marker={"size": 6, "color": colour, "symbol": SYMBOLS[number % len(SYMBOLS)]},
            text=texts,
            name=f"{name}{of}",
            hovertemplate="%{text}<br>%{x:.1f} % of the firings left<extra></extra>",
        )
    finish(figure, 380, top=16)
    figure.update_layout(showlegend=True, legend={"orientation": "h", "y": -0.18, "font": {"color": WORDS}})
    figure.update_xaxes(title="firings left, %", range=[102, 0])
    figure.update_yaxes(title="change of the loss, nats a token")
    return figure


def loss_by_layer(rows: pd.DataFrame) -> go.Figure:
    """Return a dot a layer: the change of the loss without its FFN, with its interval.

    Args:
        rows: those of `layer_rows`.
    """
    figure = go.Figure(
        dots(
            rows["change"],
            rows["layer"],
            rows["low"],
            rows["high"],
            hovertemplate="layer %{y}: %{x:+.4f} nats a token<extra></extra>",
        )
    )
    finish_layers(figure, rows["layer"], left=40, top=12)
    figure.add_vline(x=0, line={"color": GREY, "width": 1})
    figure.update_xaxes(title="change of the loss without the layer's FFN, nats a token")
    return figure


def share_by_layer(table: pd.DataFrame) -> go.Figure:
    """Return a bar a layer: the share of its smallest values that is set to 0 within a budget of loss.

    Args:
        table: the rows of `analysis.allocation`.
    """
    figure = go.Figure(
        go.Bar(
            x=100 * table["share"],
            y=table["layer"],
            orientation="h",
            marker={"color": BLUE},
            text=[f"{change:+.4f} nats alone" for change in table["change"]],
            textposition="none",
            hovertemplate="layer %{y}: %{x:.0f} % of its values, %{text}<extra></extra>",
        )
    )
    finish_layers(figure, table["layer"], left=40, top=12)
    figure.update_xaxes(title="share of the layer's values that is set to 0, %", range=[0, 100])
    return figure


def effect_by_density(table: pd.DataFrame) -> go.Figure:
    """Return a dot a neuron: how often it fires, and what silencing it does; exact values are amber.

    Args:
        table: the rows of `analysis.neuron_effects`, of which the first MOST are drawn.
    """
    figure, living = go.Figure(), table[table["fires"] > 0]
    for rows, column, colour, size in (
        (living.head(MOST), "estimate", BLUE, 4),
        (living[living["exact"].notna()], "exact", AMBER, 7),
    ):
        figure.add_scatter(  # not its WebGL twin: the app's content policy leaves that blank
            x=rows["density"],
            y=rows[column].abs().clip(lower=1e-9),
            mode="markers",
            marker={"color": colour, "size": size, "opacity": 0.5 if size == 4 else 0.9},
            text=[f"{label}: {change:+.2e} nats, fires on {percent(density)}" for label, change, density in
                  zip(rows["label"], rows[column], rows["density"], strict=True)],
            hovertemplate="%{text}<extra></extra>",
        )  # fmt: skip
    finish(figure, 380, left=80, top=16)
    figure.update_xaxes(title="density: share of tokens that fire it", type="log")
    figure.update_yaxes(title="|change of the loss|, nats a token", title_standoff=14, type="log")
    if len(living):
        densities, changes = (np.concatenate([trace[axis] for trace in figure.data]) for axis in "xy")
        ticks, _ = log_ticks(densities.min(), densities.max())
        figure.update_xaxes(tickvals=ticks, ticktext=[density_label(tick) for tick in ticks])
        ticks, names = log_ticks(changes.min(), changes.max())
        figure.update_yaxes(tickvals=ticks, ticktext=names)
    return figure


def ablation_curves(run: Run) -> go.Figure:
    """Draw the change of the loss against the share of firings that is left. Page What matters."""
    return loss_by_share(curve_rows(run))


def ablation_layers(run: Run) -> go.Figure:
    """Draw the change of the loss without each layer's FFN. Page What matters."""
    return loss_by_layer(layer_rows(run))


def ablation_budget(run: Run) -> go.Figure:
    """Draw the share of each layer's values that is set to 0 within a budget of loss. Page What matters."""
    return share_by_layer(allocation(run))


def ablation_neurons(run: Run) -> go.Figure:
    """Draw each neuron's effect on the loss against how often it fires. Page What matters."""
    return effect_by_density(neuron_effects(run))
