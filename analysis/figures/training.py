"""The figures of the Training page: loss, maps of layers over steps, and what a step takes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twell.analysis.figures.labels import number, percent, whole
from twell.analysis.figures.style import AMBER, BLUE, GREY, SCALE, finish, finish_layers, panel_title
from twell.analysis.training import sparse_since, training_layers, training_steps
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

WIDEST = 500  # columns of a map: each is two pixels or more, and what it says is not 56 000 numbers
FEW = 10  # steps, each of which has a tick
FEWEST = 0.1  # nnz: the bottom of the colour scale, where a layer fires next to nothing
SPREAD = 1.01  # top over bottom of the colour scale, at least: layers that are all alike would have none


def loss_curves(steps: pd.DataFrame) -> go.Figure:
    """Return panels over the steps: the loss in training and on held-out text, and the L1 term of the objective.

    A log without an L1 term has no panel of it. A dashed line is the loss of the model that the training goes on from,
    where it does.

    Args:
        steps: the rows of `analysis.training_steps`.
    """
    term = steps["l1"] * steps["l1_coefficient"].astype(float)
    widths = [0.62, 0.38] if term.notna().any() else [1.0]
    figure = make_subplots(rows=1, cols=len(widths), column_widths=widths, horizontal_spacing=0.08)
    _line(figure, 1, steps["step"], steps["loss"], BLUE, "training", "nats")
    heldout = steps[steps["heldout_loss"].notna()]
    figure.add_scatter(
        x=heldout["step"],
        y=heldout["heldout_loss"],
        mode="markers",
        marker={"color": AMBER, "size": 7},
        hovertemplate="step %{x}: %{y:.4g} nats on held-out text<extra></extra>",
        row=1,
        col=1,
    )
    origin = steps.attrs.get("origin_loss")
    if origin is not None:
        figure.add_scatter(
            x=steps["step"].iloc[[0, -1]],
            y=[origin, origin],
            mode="lines",
            line={"color": GREY, "width": 1.4, "dash": "dash"},
            hovertemplate=f"{steps.attrs['origin']}: %{{y:.4g}} nats on held-out text<extra></extra>",
            row=1,
            col=1,
        )
    if len(widths) == 2:
        _line(figure, 2, steps["step"], term, GREY, "L1 term", "added to the loss")
    finish(figure, 300, top=36)
    _name_steps(figure, steps["step"])
    figure.update_yaxes(title="nats a token", col=1)
    held_out = ", ● held-out" if len(heldout) else ""
    titles = (f"loss{held_out}" + ("" if origin is None else ", – – the original"), "L1 term × its coefficient")
    titled = enumerate(titles[: len(widths)], start=1)
    figure.update_layout(annotations=[panel_title(name, column) for column, name in titled])
    return figure


def layer_map(layers: pd.DataFrame, column: str) -> go.Figure:
    """Return a map with a row a layer and a column a step.

    Args:
        layers: the rows of `analysis.training_layers`.
        column: nnz, on a logarithmic scale of colours from the least to the greatest, or dead, on one from 0 to
            the greatest share.
    """
    grid = _narrowed(layers.pivot(index="layer", columns="step", values=column))
    values = grid.to_numpy(np.float32)
    if column == "nnz":
        least = max(float(np.nanmin(values)), FEWEST)
        most = max(float(np.nanmax(values)), least * SPREAD)
        ticks = [least, (least * most) ** 0.5, most]
        colour = {"z": np.log10(np.maximum(values, least)), "zmin": np.log10(least), "zmax": np.log10(most)}
        colour["customdata"], said = values, "nnz %{customdata:.4~g}"
        bar = {"tickvals": np.log10(ticks), "ticktext": [number(tick) for tick in ticks]}
    else:
        most = float(np.nanmax(values)) or 1.0
        colour, said = {"z": values, "zmin": 0.0, "zmax": most}, "%{z:.3~p}"
        bar = {"tickvals": [0, most / 2, most], "ticktext": [percent(tick) for tick in (0, most / 2, most)]}
    figure = go.Figure(
        go.Heatmap(
            x=grid.columns,
            y=grid.index,
            colorscale=SCALE,
            colorbar={**bar, "thickness": 10, "outlinewidth": 0, "len": 1.0},
            hovertemplate=f"layer %{{y}}, step %{{x}}: {said}<extra></extra>",
            **colour,
        )
    )
    finish_layers(figure, grid.index, left=40, right=70, top=12)
    figure.update_yaxes(showgrid=False)
    _name_steps(figure, grid.columns)
    figure.update_xaxes(showgrid=False)
    return figure


def rows_a_column(rows: int) -> int:
    """Return how many rows of a log a column of its maps is the mean of. rows: of the log"""
    return -(-rows // WIDEST)


def _narrowed(grid: pd.DataFrame) -> pd.DataFrame:
    """Return a map of layers by steps with at most WIDEST columns, each the mean of as many neighbouring steps."""
    together = rows_a_column(len(grid.columns))
    if together == 1:
        return grid
    groups = np.arange(len(grid.columns)) // together
    narrow = grid.T.groupby(groups).mean().T
    return narrow.set_axis(pd.Series(grid.columns).groupby(groups).mean().to_numpy(), axis=1)


def went_sparse(since: pd.DataFrame, last: int) -> go.Figure:
    """Return a row a layer: a dot at the step from which on it is sparse, none where it is not.

    Args:
        since: the rows of `analysis.sparse_since`.
        last: the last step of the log.

    Returns:
        The figure. Raises Missing where no layer is sparse: lines without a dot would not say so.
    """
    known = since[since["step"].notna()]
    if known.empty:
        nearest = since.loc[since["nnz"].idxmin()]
        raise Missing(
            f"No layer is sparse by step {whole(last)}: L{int(nearest.layer)} then fires the fewest neurons, "
            f"{number(nearest.nnz)} a token."
        )
    figure = go.Figure(
        go.Scatter(
            x=known["step"].astype(int),
            y=known["layer"],
            mode="markers",
            marker={"color": BLUE, "size": 8},
            text=[f"{whole(row.tokens)} tokens; nnz {number(row.nnz)} at the end" for row in known.itertuples()],
            hovertemplate="layer %{y}: sparse from step %{x} on, %{text}<extra></extra>",
        )
    )
    finish_layers(figure, since["layer"], left=40, top=12)
    _name_steps(figure, [0, last])
    figure.update_xaxes(range=[0, last * 1.02])
    return figure


def speed_curves(steps: pd.DataFrame) -> go.Figure:
    """Return the panels of speed that the log has: tokens a second, a step's speedup, peak memory."""
    panels = [("tokens a second", steps["tokens_per_second"], "tokens/s")]
    if steps["step_speedup"].notna().any():
        panels.append(("dense step / sparse step", steps["step_speedup"], "×"))
    if steps["peak_bytes"].notna().any():
        panels.append(("peak memory, GiB", steps["peak_bytes"].astype(float) / 2**30, "GiB"))
    figure = make_subplots(rows=1, cols=len(panels), horizontal_spacing=0.08)
    for column, (_, values, unit) in enumerate(panels, start=1):
        _line(figure, column, steps["step"], values, BLUE, "", unit)
        figure.update_yaxes(rangemode="tozero", row=1, col=column)
    finish(figure, 260, top=36)
    last = float(steps["step"].iloc[-1])
    _name_steps(figure, [0, last])
    figure.update_xaxes(range=[-0.02 * last, 1.02 * last])  # one for all: a step may be timed once
    figure.update_layout(annotations=[panel_title(name, column) for column, (name, *_) in enumerate(panels, start=1)])
    return figure


def _name_steps(figure: go.Figure, steps: Iterable[float]) -> None:
    """Title the x axes; a log of few steps has a tick a step, for there are no steps between them."""
    steps = list(steps)
    figure.update_xaxes(title="step", dtick=1 if max(steps) - min(steps) <= FEW else None)


def _line(figure: go.Figure, column: int, x: pd.Series, y: pd.Series, colour: str, name: str, unit: str) -> None:
    """Add a line to a panel, without the rows that have no value."""
    known = y.notna()
    figure.add_scatter(
        x=x[known],
        y=y[known],
        mode="lines+markers" if known.sum() < 3 else "lines",
        line={"color": colour, "width": 1.8},
        hovertemplate=f"step %{{x}}: %{{y:.4g}} {unit} {name}".rstrip() + "<extra></extra>",
        row=1,
        col=column,
    )


def training_loss(run: Run) -> go.Figure:
    """Draw loss and L1 term by step. Page Training."""
    return loss_curves(training_steps(run))


def training_nnz(run: Run) -> go.Figure:
    """Draw mean nnz by layer and step. Page Training."""
    return layer_map(training_layers(run), "nnz")


def training_silent(run: Run) -> go.Figure:
    """Draw the share of neurons that fired on no token of the last steps, by layer and step. Page Training."""
    return layer_map(training_layers(run), "dead")


def training_went_sparse(run: Run) -> go.Figure:
    """Draw the step from which each layer is sparse. Page Training."""
    return went_sparse(sparse_since(run), int(training_steps(run)["step"].iloc[-1]))


def training_speed(run: Run) -> go.Figure:
    """Draw tokens a second, speedup of a step and memory by step. Page Training."""
    return speed_curves(training_steps(run))
