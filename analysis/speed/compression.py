"""Compression: which one runs a layer fastest without any row past its slots.

    tile_settings(run)   a row a layer, number of rows and compression that `twell bench --out RUN` has timed

A setting is safe, for a kernel that drops what overflows, if all rows fit into its slots. The workbench's kernels keep
what overflows: with them an unsafe setting is correct too, and may be the faster one. Cost: 20 ms.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.analysis.speed.tile_overflow import tile_audit
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

CASE = ["case", "layer", "rows", "dtype", "weights", "device"]
ONE_EACH = (
    "Every kernel was timed at one compression, so which is the fastest safe one is not told: time several in one "
    "bench, twell bench MODEL --compression 4,8,16 --out RUN."
)
SETTING = ["tile", "compression", "kernel"]


def tile_settings(run: Run) -> pd.DataFrame:
    """Return the timings of each layer at each compression; a row a layer, number of rows and compression. Columns:

    case; layer; rows (in a call); dtype; weights (warm, cold); device; tile, compression, slots; kernel; microseconds
    (of the sparse FFN); speedup (dense over sparse, of the same case); past_share (rows of the case past their slots;
    empty where the bench did not count them); rows_over_share (tokens of the run past them; empty where it counted no
    tiles of that size); safe (neither has any, and one is known); fastest (of the safe ones of that case). Layers of
    this run alone; Missing where none was timed. `attrs["note"]` says so where no kernel was timed at several
    compressions, so that there is nothing to choose from.
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
    past = frame.get("rows_past_slots", pd.Series(np.nan, frame.index))  # benches of other programs may lack it
    frame["past_share"] = past / frame["rows"]
    at_risk, lacking = _at_risk(run)
    frame = frame.merge(at_risk, on=["layer", "tile", "compression"], how="left")
    shares = frame[["past_share", "rows_over_share"]]
    frame["safe"] = shares.notna().any(axis=1) & ~(shares > 0).any(axis=1)
    best = frame[frame["safe"]].groupby(CASE)["microseconds"].idxmin()
    frame["fastest"] = np.isin(frame.index, best)
    names = [*CASE, "tile", "compression", "slots", "kernel", "microseconds", "speedup", "past_share"]
    frame = frame[[*names, "rows_over_share", "safe", "fastest"]]
    several = frame.groupby([*CASE, "kernel"])["compression"].nunique() > 1
    note = "safe: no row past its slots, here or in the run" if several.any() else ONE_EACH
    note = f"{note}; rows_over_share is empty: {lacking}" if lacking else note
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": note}
    return frame


def _at_risk(run: Run) -> tuple[pd.DataFrame, str]:
    """Return the share of the run's tokens past their slots, by layer, tile and compression; no row if none were
    counted, and why."""
    names = ["layer", "tile", "compression", "rows_over_share"]
    try:
        return tile_audit(run)[names], ""
    except Missing as reason:
        none = pd.DataFrame(columns=names).astype({"layer": int, "tile": int, "compression": int})
        return none.astype({"rows_over_share": float}), str(reason).rstrip(".")
