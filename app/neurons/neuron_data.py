"""The tables behind the Neurons pages: neurons by density, lists of neurons, and one neuron's rank in its layer.

All come from `analysis.by_neuron`. The results are small, however many neurons the model has.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from twell import analysis
from twell.app.ui.query import Query
from twell.workbench.run.store import Run

KINDS = {
    "hot": "Most frequent",
    "strong": "Strongest",
    "one": "One token only",
    "rare": "Rarest",
    "dead": "Never fired",
}
NOTES = {
    "hot": "Highest density first.",
    "strong": "Largest value first.",
    "one": "These neurons fired more than once, always on the same token of the vocabulary.",
    "rare": "Lowest density first, without neurons that never fired.",
    "dead": "These neurons did not fire on any token counted here.",
}
MAX_ROWS = 1000  # of a list that go to the browser


def density_bounds(tokens: int) -> list[float]:
    """Return the bounds of bins of densities, 1, 3, 10, … from the lowest that `tokens` tokens can show up to 1."""
    lowest = 1 / max(tokens, 2)
    bounds = [step * 10.0**power for power in range(math.floor(math.log10(lowest)), 0) for step in (1, 3)]
    start = max(index for index, bound in enumerate(bounds) if bound <= lowest)
    return [*bounds[start:], 1.0 + 1e-9]


def density_bins(run: Run) -> pd.DataFrame:
    """Return how many neurons of each layer have which density.

    Columns: layer; low, high (bounds of the density, both 0 for neurons that never fired); neurons; share (of the
    layer's neurons).
    """
    frame = analysis.by_neuron(run)
    bounds = density_bounds(int(frame["tokens"].iloc[0]))
    index = np.searchsorted(bounds, frame["density"], side="right")  # 0: never fired
    counts = pd.crosstab(frame["layer"], index).reindex(columns=range(len(bounds)), fill_value=0)
    bins = counts.rename_axis("bin", axis=1).stack().rename("neurons").reset_index()
    edges = [0.0, *bounds]
    bins["low"] = [0.0 if k == 0 else edges[k] for k in bins["bin"]]
    bins["high"] = [0.0 if k == 0 else min(edges[k + 1], 1.0) for k in bins["bin"]]
    bins["share"] = bins["neurons"] / run.d_ff
    return bins[["layer", "low", "high", "neurons", "share"]]


def neuron_list(run: Run, layer: int | None, kind: str) -> pd.DataFrame:
    """Return the first MAX_ROWS neurons of a kind, as rows of `analysis.by_neuron`.

    Args:
        run: the run.
        layer: the layer; None for all.
        kind: a key of KINDS; NOTES says in which order they come.

    Returns:
        The rows. `attrs["count"]` is how many neurons of the kind there are.
    """
    frame = analysis.by_neuron(run) if layer is None else analysis.by_neuron(run, layer=layer)
    fired = frame["fires"] > 0
    if kind == "dead":
        rows = frame[~fired]
    elif kind == "one":
        rows = frame[frame["one_token"] & (frame["fires"] > 1)].sort_values("fires", ascending=False, kind="stable")
    elif kind == "strong":
        rows = frame[fired].sort_values("value_max", ascending=False, kind="stable")
    else:
        rows = frame[fired].sort_values("density", ascending=kind == "rare", kind="stable")
    first = rows.head(MAX_ROWS).reset_index(drop=True)
    first.attrs["count"] = len(rows)
    return first


def one_neuron(run: Run, layer: int, neuron: int) -> dict[str, object]:
    """Return a neuron's row of `analysis.by_neuron`, and its rank by density in its layer (1 is the highest)."""
    frame = analysis.by_neuron(run, layer=layer)
    row = dict(frame.iloc[neuron])
    row["rank"] = int((frame["density"] > row["density"]).sum()) + 1
    return row


def ranks(run: Run, layer: int) -> pd.DataFrame:
    """Return the densities of a layer's neurons, highest first. Columns: rank (from 1), density."""
    densities = -np.sort(-analysis.by_neuron(run, layer=layer)["density"].to_numpy(float))
    return pd.DataFrame({"rank": np.arange(1, len(densities) + 1), "density": densities})


DENSITIES = Query(density_bins)
LIST = Query(neuron_list, {"layer": None, "kind": "hot"})
DEFAULT_QUERIES = (DENSITIES, LIST)
