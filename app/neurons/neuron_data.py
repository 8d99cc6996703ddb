"""Neurons as the pages want them: how densities spread in each layer, the neurons at either end, one neuron's place.

All from `analysis.by_neuron`; what is kept for the pages is small, however many neurons the model has.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from twell import analysis
from twell.app.ui.query import Query
from twell.workbench.run.store import Run

NEVER = "never"
KINDS = {"hot": "Hottest", "strong": "Strongest", "one": "One token only", "rare": "Rarest", "dead": "Never fired"}
NOTES = {
    "hot": "Highest density first.",
    "strong": "Largest value first.",
    "one": "These neurons fired more than once, always on the same token of the vocabulary.",
    "rare": "Lowest density first, without neurons that never fired.",
    "dead": "These neurons did not fire on any token counted here.",
}
LISTED = 1000  # neurons of a list that go to the browser


def edges(tokens: int) -> list[float]:
    """Bounds of the densities, 1, 3, 10, … from the least that the run can tell up to always."""
    low = math.floor(math.log10(1 / max(tokens, 2)))
    bounds = [step * 10.0**power for power in range(low, 0) for step in (1, 3)]
    least = max(place for place, bound in enumerate(bounds) if bound <= 1 / max(tokens, 2))
    return [*bounds[least:], 1.0 + 1e-9]


def density_bins(run: Run) -> pd.DataFrame:
    """How many neurons of each layer have which density. Columns: layer; low, high (0, 0: never fired); neurons; share
    (of the layer's)."""
    frame = analysis.by_neuron(run)
    bounds = edges(int(frame["tokens"].iloc[0]))
    place = np.searchsorted(bounds, frame["density"], side="right")
    counted = pd.crosstab(frame["layer"], place).reindex(columns=range(len(bounds)), fill_value=0)
    found = counted.rename_axis("place", axis=1).stack().rename("neurons").reset_index()
    ends = [0.0, *bounds]
    found["low"] = [0.0 if p == 0 else ends[p] for p in found["place"]]
    found["high"] = [0.0 if p == 0 else min(ends[p + 1], 1.0) for p in found["place"]]
    found["share"] = found["neurons"] / run.d_ff
    return found[["layer", "low", "high", "neurons", "share"]]


def neuron_list(run: Run, layer: int | None, kind: str) -> pd.DataFrame:
    """The neurons of a kind, the foremost first, at most LISTED of them, as by_neuron has them. `attrs`: count (how
    many there are)."""
    frame = analysis.by_neuron(run) if layer is None else analysis.by_neuron(run, layer=layer)
    fired = frame["fires"] > 0
    if kind == "dead":
        found = frame[~fired]
    elif kind == "one":
        found = frame[frame["one_token"] & (frame["fires"] > 1)].sort_values("fires", ascending=False, kind="stable")
    elif kind == "strong":
        found = frame[fired].sort_values("value_max", ascending=False, kind="stable")
    else:
        found = frame[fired].sort_values("density", ascending=kind == "rare", kind="stable")
    listed = found.head(LISTED).reset_index(drop=True)
    listed.attrs["count"] = len(found)
    return listed


def one_neuron(run: Run, layer: int, neuron: int) -> dict[str, object]:
    """A neuron's row of by_neuron, with its rank by density in its layer."""
    frame = analysis.by_neuron(run, layer=layer)
    row = dict(frame.iloc[neuron])
    row["rank"] = int((frame["density"] > row["density"]).sum()) + 1
    return row


def ranks(run: Run, layer: int) -> pd.DataFrame:
    """The densities of a layer's neurons, the busiest first. Columns: rank (from 1), density."""
    densities = -np.sort(-analysis.by_neuron(run, layer=layer)["density"].to_numpy(float))
    return pd.DataFrame({"rank": np.arange(1, len(densities) + 1), "density": densities})


DENSITIES = Query(density_bins)
LIST = Query(neuron_list, {"layer": None, "kind": "hot"})
DEFAULT_QUERIES = (DENSITIES, LIST)
