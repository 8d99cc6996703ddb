"""Times by layer and compression, the fastest safe one marked."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from twell.analysis.figures.labels import number, percent
from twell.analysis.figures.speed.kernels import compression_map
from twell.analysis.figures.speed.timings import time_unit

SETTING = [
    "rows",
    "dtype",
    "weights",
    "device",
]  # times are compared only if all of these are equal


def fastest_kernels(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row a layer and compression of `tile_settings`: the fastest kernel in the layer's first case.

    The setting (rows, dtype, weights, device) is the one timed at most compressions. The reference kernel counts only
    if no other was timed. Columns are those of `tile_settings`; `fastest` compares the rows returned.
    """
    if (frame["kernel"] != "reference").any():
        frame = frame[frame["kernel"] != "reference"]
    sizes = frame.groupby(SETTING).agg(compressions=("compression", "nunique"), layers=("layer", "nunique"))
    setting = sizes.sort_values(["compressions", "layers"], kind="stable").index[-1]
    rows = frame[(frame[SETTING] == list(setting)).all(axis=1)]
    rows = rows[rows["case"] == rows.groupby("layer")["case"].transform("first")]
    rows = rows.loc[rows.groupby(["layer", "compression"])["microseconds"].idxmin()].reset_index(drop=True)
    safe = rows[rows["safe"]]
    rows["fastest"] = rows.index.isin(safe.groupby("layer")["microseconds"].idxmin())
    return rows


def time_map(frame: pd.DataFrame) -> go.Figure:
    """Return a heat map of time by layer and compression, each cell shaded by its ratio to the layer's shortest time.

    Args:
        frame: the rows of `fastest_kernels`.
    """
    unit, scale = time_unit(float(frame["microseconds"].max()))
    labels = frame.assign(
        label=[
            ("✓ " * row.fastest)
            + f"{number(row.microseconds * scale)} {unit}"
            + ("" if row.safe else f" ({overflow_share(row.past_share, row.rows_over_share)})")
            for row in frame.itertuples()
        ]
    ).pivot(index="layer", columns="compression", values="label")
    us = frame.pivot(index="layer", columns="compression", values="microseconds")
    slowdown = us.div(us.min(axis=1), axis=0)
    limits = (1, max(1.5, float(slowdown.max(axis=None))))
    hover = "layer %{y:.0f}: %{text}, %{z:.3g} × its shortest time<extra></extra>"
    return compression_map(frame, slowdown, limits, labels.fillna(""), hover)


def overflow_share(case_share: float, run_share: float) -> str:
    """Return the share (0 to 1) of rows that overflow as a percentage: the timed case's or, if that is 0, the run's."""
    return percent(case_share) if case_share > 0 else f"{percent(run_share)} of the run"
