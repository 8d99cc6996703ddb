"""The figure of compressions on the Kernels page: each one's time, and the share of rows that overflow its slots."""

from __future__ import annotations

from twell import analysis
from twell.analysis.figures.speed.compressions import fastest_kernels, time_map
from twell.analysis.memo import built_once
from twell.app.ui import widgets
from twell.app.ui.formatting import plural, whole
from twell.app.ui.query import query
from twell.workbench.run.store import Run

HOW_TO_TIME_MORE = (
    "To time others, choose Compressions under Measure now, or run twell bench MODEL --compression 4,8,16 --out RUN."
)


def draw_compressions(run: Run) -> None:
    """Draw the time by layer and compression, the fastest safe one marked.

    If only one compression was timed, say how to time more; if none was, draw nothing.
    """
    result = query(run, analysis.tile_settings).then(fastest_kernels)
    if not result.known:
        return
    frame = result.frame
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
    widgets.draw(built_once(time_map, frame), "settings", alt)
