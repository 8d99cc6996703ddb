"""Which compression to choose, on the Kernels page: what each costs in time, beside the rows that its slots do not
hold."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from twell import analysis
from twell.app.speed.kernel_figures import by_compression
from twell.app.speed.timing_figures import time_unit
from twell.app.ui import widgets
from twell.app.ui.formatting import number, percent, plural, whole
from twell.app.ui.query import query
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

TOGETHER = ["rows", "dtype", "weights", "device"]  # what times have to share to be compared
HOW = (
    "To time the others, choose Compressions under Measure now, or run "
    "twell bench MODEL --compression 4,8,16 --out RUN."
)


def compressions(run: Run) -> None:
    """Time by layer and compression with the fastest safe one marked; or, where one alone was timed, how to time more;
    nothing where none was."""
    try:
        result = query(run, analysis.tile_settings).then(timed)
        frame = result.frame
    except Missing:
        return
    several = frame["compression"].nunique() > 1
    name = "Fastest safe compression"
    if not several:
        only = int(frame["compression"].iloc[0])
        holds = ", ".join(f"L{layer}" for layer in frame.loc[frame["safe"], "layer"])
        widgets.heading(
            name,
            f"Only compression {only} has been timed, so there is no choice yet. Its slots hold every row in "
            f"{holds or 'no layer'}. {HOW}",
        )
        return
    first = frame.iloc[0]
    unmarked = sorted(set(frame["layer"]) - set(frame.loc[frame["fastest"], "layer"]))
    none = f" In {', '.join(f'L{layer}' for layer in unmarked)} no compression timed holds every row." * bool(unmarked)
    widgets.heading(
        name,
        f"Time of the sparse FFN with the fastest kernel; {whole(first['rows'])} rows, {first['dtype']}, "
        f"{first['weights']} weights, {first['device']}. ✓: the fastest compression whose slots hold every row "
        f"of this input and of the run. In brackets: the share of rows that overflow; these are exact too.{none}",
        result,
    )
    alt = f"Time by layer and compression, {plural(frame['layer'].nunique(), 'layer')}"
    widgets.draw(settings_map(frame), "settings", alt)


def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """A row a layer and compression, in the setting timed at most compressions: the layer's first case, and the
    fastest kernel in it (the reference only where it is alone). Columns of tile_settings, `fastest` among these."""
    if (frame["kernel"] != "reference").any():
        frame = frame[frame["kernel"] != "reference"]
    sizes = frame.groupby(TOGETHER).agg(c=("compression", "nunique"), layers=("layer", "nunique"))
    best = sizes.sort_values(["c", "layers"], kind="stable").index[-1]
    part = frame[(frame[TOGETHER] == list(best)).all(axis=1)]
    part = part[part["case"] == part.groupby("layer")["case"].transform("first")]
    part = part.loc[part.groupby(["layer", "compression"])["microseconds"].idxmin()].reset_index(drop=True)
    safe = part[part["safe"]]
    part["fastest"] = part.index.isin(safe.groupby("layer")["microseconds"].idxmin())
    return part


def settings_map(frame: pd.DataFrame) -> go.Figure:
    """Times as shades, each layer's own least the faintest; a mark on the fastest safe one (timed)."""
    unit, scale = time_unit(float(frame["microseconds"].max()))
    table = frame.pivot(index="layer", columns="compression", values="microseconds")
    words = frame.assign(
        said=[
            ("✓ " * row.fastest)
            + f"{number(row.microseconds * scale)} {unit}"
            + ("" if row.safe else f" ({past(row.past_share, row.rows_over_share)})")
            for row in frame.itertuples()
        ]
    ).pivot(index="layer", columns="compression", values="said")
    slower = table.div(table.min(axis=1), axis=0)
    ends = (1, max(1.5, float(slower.max(axis=None))))
    hover = "layer %{y:.0f}: %{text}, %{z:.3g} × its fastest<extra></extra>"
    return by_compression(frame, slower, ends, words.fillna(""), hover)


def past(here: float, run: float) -> str:
    """The share of rows past the slots, of the case that was timed or, where it has none, of the run."""
    return percent(here) if here > 0 else f"{percent(run)} of the run"
