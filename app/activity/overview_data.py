"""The table behind the Overview's figure, a row a layer. Cost: that of the three tables it joins."""

from __future__ import annotations

import pandas as pd

from twell import analysis
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

BLOCKS = 16  # of positions, each a column of the map


def layer_rows(run: Run) -> pd.DataFrame:
    """Return one row a layer with everything that the figure draws.

    Columns: layer; "nnz from position P" (mean nnz from position P to the next block's); mean, p10, p90 (of a token's
    nnz); dead_share; speedup (dense time / sparse time of the FFN), if a kernel other than the reference was timed.
    """
    blocks = analysis.position_blocks(run, blocks=BLOCKS)
    table = blocks.pivot(index="layer", columns="position_from", values="mean")
    table.columns = [f"nnz from position {start}" for start in table.columns]
    table = table.join(analysis.by_layer(run).set_index("layer")[["mean", "p10", "p90", "dead_share"]])
    speedup = comparable_speedup(run)
    if speedup is not None:
        table = table.join(speedup.set_index("layer")["speedup"])
    return table.reset_index()


def comparable_speedup(run: Run) -> pd.DataFrame | None:
    """Return `analysis.speedup`; None if nothing was timed, or only the reference kernel."""
    try:
        speedup = analysis.speedup(run)
    except Missing:
        return None
    return speedup if speedup.attrs["comparable"] else None
