"""What the Overview's figure draws, a row a layer. Cost: that of the three answers it joins."""

from __future__ import annotations

import pandas as pd

from twell import analysis
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

BLOCKS = 16  # of positions, that the map has columns for


def layer_rows(run: Run) -> pd.DataFrame:
    """Columns: layer; "nnz from position P" (mean nnz of a block of positions, up to the next one's); mean, p10, p90
    (of a token's nnz); dead_share; speedup (dense over sparse time of the FFN), where timed against a fast kernel."""
    blocks = analysis.position_blocks(run, blocks=BLOCKS)
    table = blocks.pivot(index="layer", columns="position_from", values="mean")
    table.columns = [f"nnz from position {start}" for start in table.columns]
    table = table.join(analysis.by_layer(run).set_index("layer")[["mean", "p10", "p90", "dead_share"]])
    gains = fair_speedup(run)
    if gains is not None:
        table = table.join(gains.set_index("layer")["speedup"])
    return table.reset_index()


def fair_speedup(run: Run) -> pd.DataFrame | None:
    """The answer of `speedup`; None where nothing was timed, or the reference kernel was."""
    try:
        gains = analysis.speedup(run)
    except Missing:
        return None
    return gains if gains.attrs["comparable"] else None
