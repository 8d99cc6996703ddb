"""The figure of compressions on the Kernels page: each one's time, and the share of rows that overflow its slots."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from twell import analysis
from twell.app.speed.kernel_figures import compression_map
from twell.app.speed.timing_figures import time_unit
from twell.app.ui import widgets
from twell.app.ui.formatting import number, percent, plural, whole
from twell.app.ui.query import query
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

SETTING = ["rows", "dtype", "weights", "device"]  # times are compared only if all of these are equal
HOW_TO_TIME_MORE = (
    "To time others, choose Compressions under Measure now, or run twell bench MODEL --compression 4,8,16 --out RUN."
)


def draw_compressions(run: Run) -> None:
    """Draw the time by layer and compression, the fastest safe one marked.

    If only one compression was timed, say how to time more; if none was, draw nothing.
    """
    try:
        result = query(run, analysis.tile_settings).then(fastest_kernels)
        frame = result.frame
    except Missing:
        return
    title = "Fastest safe compression"
    if frame["compression"].nunique() == 1:
        safe = ", ".join(f"L{layer}" for layer in frame.loc[frame["safe"], "layer"])
        widgets.heading(
            title,
            f"Only compression {int(frame['compression'].iloc[0])} has been timed, so there is nothing to compare yet. "
            f"Every row fits its slots in {safe or 'no layer'}. {HOW_TO_TIME_MORE}",
        )
        return
    first = frame.iloc[0]
    unsafe = sorted(set(frame["layer"]) - set(frame.loc[frame["fastest"], "layer"]))
    unsafe_layers = ", ".join(f"L{layer}" for layer in unsafe)
    widgets.heading(
        title,
        f"Time of the sparse FFN with the fastest kernel; {whole(first['rows'])} rows, {first['dtype']}, "
        f"{first['weights']} weights, {first['device']}. ✓ marks the fastest safe compression: every row of this input "
        "and of the run fits its slots. In brackets: the share of rows that overflow. Their results are exact too."
        + (f" No compression timed is safe in {unsafe_layers}." if unsafe else ""),
        result,
    )
    alt = f"Time by layer and compression, {plural(frame['layer'].nunique(), 'layer')}"
    widgets.draw(time_map(frame), "settings", alt)


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
