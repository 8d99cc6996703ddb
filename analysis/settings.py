"""Settings: which compression runs a layer fastest without any row past its slots.

    tile_settings(run)   a row a layer, number of rows and compression that `twell bench --out RUN` has timed

Slots that all rows fit into are safe for a kernel that drops what overflows; the workbench's kernels keep it, so there
an unsafe setting may be the faster one and is right all the same. Cost: 20 ms.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.analysis.tiles import tile_audit
from twell.workbench.errors import Missing
from twell.workbench.store import Run

CASE = ["case", "layer", "rows", "dtype", "weights", "device"]
SETTING = ["tile", "compression", "kernel"]


def tile_settings(run: Run) -> pd.DataFrame:
    """Columns:

    case; layer; rows (in a call); dtype; weights (warm, cold); device; tile, compression, slots; kernel; microseconds
    (of the sparse FFN); speedup (dense over sparse, of the same case); past_share (rows of the case past their slots);
    rows_over_share (tokens of the run past them; empty where it counted no tiles of that size); safe (neither has any);
    fastest (of the safe ones of that case). Layers of this run alone; Missing where none was timed.
    """
    bench = run.frame("bench")
    bench = bench[(bench["layer"] >= 0) & (bench["layer"] < run.layers) & (bench["d_ff"] == run.d_ff)]
    sparse = bench[bench["op"] == "ffn_sparse"].pivot_table(index=CASE + SETTING, columns="metric", values="value")
    dense = bench[(bench["op"] == "ffn_dense") & (bench["metric"] == "microseconds")].groupby(CASE)["value"].median()
    if "microseconds" not in sparse:
        raise Missing(f"{run.name} holds no timing of its layers at any compression: twell bench MODEL --out RUN.")
    frame = sparse.reset_index().merge(dense.rename("dense"), on=CASE, how="left")
    frame["slots"] = frame["tile"] // frame["compression"] - 1
    frame["speedup"] = frame["dense"] / frame["microseconds"]
    frame["past_share"] = frame["rows_past_slots"] / frame["rows"]
    frame = frame.merge(_at_risk(run), on=["layer", "tile", "compression"], how="left")
    frame["safe"] = (frame["past_share"] == 0) & ~(frame["rows_over_share"] > 0)
    best = frame[frame["safe"]].groupby(CASE)["microseconds"].idxmin()
    frame["fastest"] = np.isin(frame.index, best)
    names = [*CASE, "tile", "compression", "slots", "kernel", "microseconds", "speedup", "past_share"]
    frame = frame[[*names, "rows_over_share", "safe", "fastest"]]
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": "safe: no row past its slots, here or in the run"}
    return frame


def _at_risk(run: Run) -> pd.DataFrame:
    names = ["layer", "tile", "compression", "rows_over_share"]
    try:
        return tile_audit(run)[names]
    except Missing:
        return pd.DataFrame(columns=names).astype({"layer": int, "tile": int, "compression": int})
