"""More figures of the Kernels page: where a forward pass spends its time, and how full tiles get."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from twell.app.speed.timing_figures import time_unit
from twell.app.ui.figures.plot_style import finish, layer_axis
from twell.app.ui.formatting import SPACE, percent, whole
from twell.app.ui.theme import BLUE, GREY, SCALE

FEWEST = 4  # layers that a line is drawn through
NARROW = 0.07  # of the pass: a part below it has no room for its name
SHADES = {"ffn": (BLUE, 0.95), "attention": (GREY, 0.6), "rest": (GREY, 0.3)}


def break_even(frame: pd.DataFrame) -> float | None:
    """The mean nnz at which sparse takes as long as dense, by the line (Theil-Sen) of sparse over dense time against
    nnz; None where the layers are too few, too alike, or time does not grow with nnz (speedup)."""
    nnz, ratio = frame["nnz_mean"].to_numpy(float), (frame["sparse_us"] / frame["dense_us"]).to_numpy(float)
    if len(frame) < FEWEST or np.ptp(nnz) == 0:
        return None
    i, j = np.triu_indices(len(nnz), 1)
    apart = nnz[i] != nnz[j]
    slope = float(np.median((ratio[i] - ratio[j])[apart] / (nnz[i] - nnz[j])[apart]))
    start = float(np.median(ratio - slope * nnz))
    if slope <= 0 or start >= 1:
        return None
    return (1 - start) / slope


def time_split(frame: pd.DataFrame) -> go.Figure:
    """A bar for dense, one for sparse, each of FFN, attention and the rest (model_time)."""
    rows = frame.set_index("part")
    unit, scale = time_unit(float(rows.loc["whole", ["dense_us", "sparse_us"]].max()))
    figure = go.Figure()
    for part, (color, strength) in SHADES.items():
        if part not in rows.index:
            continue
        name = "FFN" if part == "ffn" else part
        times = [max(float(rows.loc[part, f"{side}_us"]), 0.0) * scale for side in ("dense", "sparse")]
        shares = [float(rows.loc[part, f"{side}_share"]) for side in ("dense", "sparse")]
        figure.add_bar(
            y=["dense", "sparse"],
            x=times,
            orientation="h",
            marker={"color": color, "opacity": strength},
            text=[f"{name} {percent(share)}" if share >= NARROW else "" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"size": 12},
            customdata=[percent(share) for share in shares],
            hovertemplate=f"{name}: %{{x:,.4g}} {unit}, %{{customdata}} of the pass<extra></extra>",
            width=0.6,
        )
    finish(figure, 170, left=56)
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title=f"time of a forward pass, {unit}")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def of_tile(frame: pd.DataFrame, tile: int) -> pd.DataFrame:
    """The rows of tile_audit about one size of tile."""
    return frame[frame["tile"] == tile]


def audit_map(frame: pd.DataFrame) -> go.Figure:
    """Share of tokens past the slots by layer and compression (tile_audit, one tile size)."""
    values = frame.pivot(index="layer", columns="compression", values="rows_over_share")
    few = len(values) <= 20
    text = values.map(lambda share: f"<{SPACE}0.01{SPACE}%" if 0 < share < 1e-4 else percent(share)) if few else None
    hover = "layer %{y:.0f}: %{customdata:.3g} % of tokens<extra></extra>"
    return by_compression(frame, np.sqrt(values), (0, 1), text, hover, 100 * values)


def by_compression(
    frame: pd.DataFrame,
    shades: pd.DataFrame,
    ends: tuple[float, float],
    text: pd.DataFrame | None,
    hover: str,
    more: pd.DataFrame | None = None,
) -> go.Figure:
    """A heat map, a row a layer and a column a compression: `shades` between `ends`, `text` in the cells where there is
    room for it, `more` for the hover; `frame` tells the slots of each compression."""
    layers = [int(layer) for layer in shades.index]
    columns = list(range(len(shades.columns)))
    figure = go.Figure(
        go.Heatmap(
            z=shades.to_numpy(float),
            x=columns,
            y=layers,
            colorscale=SCALE,
            zmin=ends[0],
            zmax=ends[1],
            xgap=1,
            ygap=1,
            text=None if text is None else text.to_numpy(),
            texttemplate=None if text is None else "%{text}",
            textfont={"size": 11},
            customdata=None if more is None else more.to_numpy(float),
            hovertemplate=hover,
            showscale=False,
        )
    )
    slots = frame.drop_duplicates("compression").set_index("compression")["slots"]
    finish(figure, 90 + (20 if text is None else 28) * len(layers))
    layer_axis(figure, layers, showgrid=False)
    figure.update_yaxes(range=[max(layers) + 0.5, min(layers) - 0.5])
    named = [f"{compression}<br>{whole(slots[compression])} slots" for compression in shades.columns]
    figure.update_xaxes(tickvals=columns, ticktext=named, showgrid=False, title="compression")
    return figure
