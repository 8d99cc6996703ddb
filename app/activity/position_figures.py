"""The figure of the Positions page that shows over how many tokens nnz decays along a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from twell.app.activity.position_data import EXPONENTIAL
from twell.app.ui.figures.plot_style import finish, log_axis
from twell.app.ui.formatting import number
from twell.app.ui.theme import BLUE


def decay_lengths(fits: pd.DataFrame) -> go.Figure:
    """Return λ, in tokens, with its interval: a row a layer and one for their sum, with verdict and R² at the right.

    Args:
        fits: the rows of `analysis.position_fit`. λ is drawn only in layers that an exponential describes.
    """
    names = ["all layers" if layer < 0 else f"L{layer}" for layer in fits["layer"]]
    rows = fits.assign(row=range(len(fits)))
    drawn = rows[rows["verdict"].isin(EXPONENTIAL) & np.isfinite(rows["decay_high"])]
    figure = go.Figure(
        go.Scatter(
            x=drawn["decay"],
            y=drawn["row"],
            mode="markers",
            marker={"color": BLUE, "size": 8},
            error_x={
                "type": "data",
                "array": drawn["decay_high"] - drawn["decay"],
                "arrayminus": drawn["decay"] - drawn["decay_low"],
                "thickness": 1.4,
                "width": 0,
            },
            text=[_tooltip(row) for row in drawn.itertuples()],
            hovertemplate="%{text}<extra></extra>",
        )
    )
    finish(figure, 90 + max(18, min(28, 800 // len(rows))) * len(rows), left=76, right=190, top=16)
    step = 1 if len(rows) <= 33 else 2
    figure.update_yaxes(
        tickvals=list(range(len(rows)))[::-1][::step], ticktext=names[::-1][::step], range=[len(rows) - 0.4, -0.6]
    )
    at_right = {"xref": "paper", "x": 1, "xshift": 8, "xanchor": "left", "showarrow": False, "font": {"size": 12}}
    best_r2 = rows["r2"].where(rows["verdict"].isin(EXPONENTIAL), rows["power_r2"]).clip(lower=0)
    labels = [f"{verdict} · R² {number(r2, 2)}" for verdict, r2 in zip(rows["verdict"], best_r2, strict=True)]
    notes = [{**at_right, "text": label, "y": row} for row, label in enumerate(labels)]
    figure.update_layout(annotations=notes)  # all at once: added one by one, each is slower than the one before
    low, high = (float(drawn["decay_low"].min()), float(drawn["decay_high"].max())) if len(drawn) else (1.0, 100.0)
    log_axis(figure, max(low, 1e-3) / 1.3, high * 1.3, "λ, tokens")
    return figure


def _tooltip(row: Any) -> str:
    """Return the tooltip of a row of `analysis.position_fit`, as two lines of HTML."""
    return (
        f"λ {number(row.decay)} (95 % {number(row.decay_low)} to {number(row.decay_high)}) tokens<br>"
        f"level {number(row.a)} neurons, {number(row.b)} more at position 0"
    )
