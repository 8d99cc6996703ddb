"""The queries of the Neurons pages: neurons by density, lists of neurons, and one neuron's row.

All come from `analysis.by_neuron`. The results are small, however many neurons the model has.
"""

from __future__ import annotations

import pandas as pd

from twell import analysis
from twell.analysis.figures.neurons import density_bins
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


DENSITIES = Query(density_bins)
LIST = Query(neuron_list, {"layer": None, "kind": "hot"})
DEFAULT_QUERIES = (DENSITIES, LIST)
