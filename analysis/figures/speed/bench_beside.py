"""Why `twell bench` and the capture name different speedups of the same FFNs, in a sentence for each of the two.

Cost: that of `ffn_times`, milliseconds.
"""

from __future__ import annotations

import math

import pandas as pd

from twell.analysis.figures.labels import plural, times, whole
from twell.analysis.figures.speed.bench_rows import SETTING, ffn_times, layer_cases
from twell.analysis.speed.ffn_speedup import ffn_speedup, layer_names
from twell.analysis.speed.speedup import is_scaled, sizes
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


def beside_capture(run: Run) -> str:
    """Return a sentence, for beside the capture's FFN speedup, with what `twell bench` measured instead, and why; empty
    where `bench_speedup` is None."""
    found = bench_speedup(run)
    if found is None:
        return ""
    why = _why(run)
    return f"twell bench found {times(found[0])}, of {found[1]}{f': {why}' if why else ''}."


def bench_speedup(run: Run) -> tuple[float, str] | None:
    """Return the FFN speedup that `twell bench` measured of the run's kernel, and in words of which layers and rows.

    The case is the one with as many rows as the capture's batches, or the nearest; where the capture timed nothing, the
    one of most layers. None where the run has no benchmark of its kernel's FFNs.
    """
    cases = _own_cases(run) if run.has("bench") else pd.DataFrame()
    if cases.empty:
        return None
    rows = sizes(run).get("ffn_sparse") if run.has("timings") else None
    layers_of = cases.groupby("rows")["layer"].nunique()
    nearest = min(layers_of.index, key=lambda each: abs(math.log(each / rows))) if rows else layers_of.idxmax()
    chosen = cases[cases["rows"] == nearest]
    chosen = chosen[chosen["setting"] == chosen["setting"].iloc[0]]
    speedup = float((chosen["us"] * chosen["speedup"]).sum() / chosen["us"].sum())
    timed = [f"L{layer}" for layer in sorted(chosen["layer"].unique())]
    few = f"{len(timed)} of {run.layers} layers ({', '.join(timed)})"
    every = "the only layer" if run.layers == 1 else f"all {run.layers} layers"
    where = few if len(timed) < run.layers else every
    return speedup, f"{where} at {whole(nearest)} rows a call"


def beside_bench(run: Run) -> str:
    """Return a sentence, for beside the speedups of `twell bench`, with the capture's, and why they differ; empty where
    the capture timed nothing that can be compared."""
    why = _why(run)
    return f"The capture's FFN speedup is {times(ffn_speedup(run)['speedup'])}: {why}." if why else ""


def _why(run: Run) -> str:
    """Return in a clause how a benchmark and a capture time differently; empty where the capture cannot be compared."""
    try:
        total = ffn_speedup(run)
    except Missing:
        return ""
    if not total["comparable"]:
        return ""
    batches = plural(max(total["turns"], 1), "batch", "es")
    return (
        f"bench repeats one input with nothing beside it, the capture timed {layer_names(total)} as the model ran, "
        f"in {batches} {'scaled to' if is_scaled(run) else 'of'} {whole(round(sizes(run)['ffn_sparse']))} rows"
    )


def _own_cases(run: Run) -> pd.DataFrame:
    """Return the rows of `ffn_times` about layers and the kernel that the run used, with what makes their setting."""
    frame = ffn_times(run)
    own = frame["sparse"] & frame["operation"].str.startswith(f"{run.manifest.kernel['name']} kernel")
    rows = layer_cases(frame[own & frame["speedup"].notna()])
    if len(rows):  # of a kernel at several compressions, the run's own
        names, used = rows["operation"], f", compression {run.manifest.layout.get('compression')}"
        rows = rows[names == next((name for name in names if name.endswith(used)), names.iloc[0])]
    return rows.assign(setting=rows[SETTING].astype(str).agg(" ".join, axis=1) if len(rows) else "")
