"""The figure of two runs: a row a layer, a dot a run."""

from __future__ import annotations

from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from twell.app.figures import finish, layer_axis
from twell.app.theme import BLUE, GREY

LOOKS: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "size": 9},
    {"color": GREY, "size": 11, "symbol": "circle-open", "line": {"width": 2}},
)


def side_by_side(frame: pd.DataFrame, measures: dict[str, str]) -> go.Figure:
    """`frame` has layer, run (0 or 1) and the measures; `measures` gives each its name."""
    figure = make_subplots(rows=1, cols=len(measures), shared_yaxes=True, horizontal_spacing=0.04)
    layers = sorted(int(layer) for layer in frame["layer"].unique())
    for place, (measure, name) in enumerate(measures.items(), start=1):
        wide = frame.pivot(index="layer", columns="run", values=measure)
        for layer in wide.dropna().index:
            figure.add_scatter(
                x=wide.loc[layer],
                y=[layer, layer],
                mode="lines",
                line={"color": GREY, "width": 1.5},
                opacity=0.5,
                hoverinfo="skip",
                row=1,
                col=place,
            )
        for run, look in enumerate(LOOKS):
            part = frame[frame["run"] == run]
            figure.add_scatter(
                x=part[measure],
                y=part["layer"],
                mode="markers",
                marker=look,
                text=part["name"],
                hovertemplate=f"layer %{{y}}, {name}: %{{x:.4g}}<extra></extra>",
                row=1,
                col=place,
            )
        figure.update_xaxes(title=name, rangemode="normal" if measure == "sparsity" else "tozero", row=1, col=place)
    finish(figure, 90 + max(18, min(34, 800 // max(len(layers), 1))) * max(len(layers), 4), left=44)
    layer_axis(figure, layers)
    return figure
