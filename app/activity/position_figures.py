"""The figure of how fast nnz falls off along a sequence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from twell.app.activity.position_data import DRAWN
from twell.app.ui.figures.plot_style import finish, log_ticks
from twell.app.ui.formatting import number
from twell.app.ui.theme import BLUE


def decays(fits: pd.DataFrame) -> go.Figure:
    """λ with its interval, a row a layer and one for their sum; at the right, the verdict and R² (position_fit)."""
    names = ["all layers" if layer < 0 else f"L{layer}" for layer in fits["layer"]]
    rows = fits.assign(place=range(len(fits)))
    told = rows[rows["verdict"].isin(DRAWN) & np.isfinite(rows["decay_high"])]
    figure = go.Figure(
        go.Scatter(
            x=told["decay"],
            y=told["place"],
            mode="markers",
            marker={"color": BLUE, "size": 8},
            error_x={
                "type": "data",
                "array": told["decay_high"] - told["decay"],
                "arrayminus": told["decay"] - told["decay_low"],
                "thickness": 1.4,
                "width": 0,
            },
            text=[_said(row) for row in told.itertuples()],
            hovertemplate="%{text}<extra></extra>",
        )
    )
    finish(figure, 90 + max(18, min(28, 800 // len(rows))) * len(rows), left=76, right=190, top=16)
    step = 1 if len(rows) <= 33 else 2
    figure.update_yaxes(
        tickvals=list(range(len(rows)))[::-1][::step], ticktext=names[::-1][::step], range=[len(rows) - 0.4, -0.6]
    )
    beside = {"xref": "paper", "x": 1, "xshift": 8, "xanchor": "left", "showarrow": False, "font": {"size": 12}}
    fits_well = rows["r2"].where(rows["verdict"].isin(DRAWN), rows["power_r2"]).clip(lower=0)
    said = [f"{verdict} · R² {number(r2, 2)}" for verdict, r2 in zip(rows["verdict"], fits_well, strict=True)]
    notes = [{**beside, "text": text, "y": place} for place, text in enumerate(said)]
    figure.update_layout(annotations=notes)  # all at once: one by one, plotly looks through those before
    low, high = (float(told["decay_low"].min()), float(told["decay_high"].max())) if len(told) else (1.0, 100.0)
    ends = max(low, 1e-3) / 1.3, high * 1.3
    ticks, text = log_ticks(*ends)
    figure.update_xaxes(
        type="log",
        title="λ, tokens",
        tickvals=ticks,
        ticktext=text,
        range=[math.log10(end) for end in ends],
    )
    return figure


def _said(row: Any) -> str:
    """A fit, in two lines."""
    return (
        f"λ {number(row.decay)} (95 % {number(row.decay_low)} to {number(row.decay_high)}) tokens<br>"
        f"level {number(row.a)}, {number(row.b)} more at position 0"
    )
