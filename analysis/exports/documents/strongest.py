"""The strongest neuron of each layer, with the text around its largest values."""

from __future__ import annotations

from contextlib import suppress

import pandas as pd

from twell.analysis.neurons.by_neuron import by_neuron
from twell.analysis.neurons.examples import examples
from twell.analysis.neurons.values import missing
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

NEURONS, PLACES = 12, 2  # neurons, and places in the text of each


def strongest(run: Run) -> pd.DataFrame:
    """Return the neurons with the largest values, one a layer, each with the places where it is largest.

    Columns: neuron (L3/N42), density, value_max; before, token, after (text around a place; "" where none is kept).
    Raises Missing where the run keeps no examples.
    """
    if not run.has("examples"):
        raise missing(run)
    table = by_neuron(run).sort_values("value_max", ascending=False).drop_duplicates("layer").head(NEURONS)
    rows: list[dict[str, object]] = []
    for row in table.itertuples():
        neuron = {"neuron": row.label, "density": row.density, "value_max": row.value_max}
        places: list[dict[str, object]] = []
        with suppress(Missing):  # a neuron of which none is kept
            kept = examples(run, int(row.layer), int(row.neuron), width=8)
            top = kept[kept["kind"] == "top"].head(PLACES)
            places = top[["before", "token", "after"]].to_dict("records")
        rows += [neuron | place for place in places or [{"before": "", "token": "", "after": ""}]]
    return pd.DataFrame(rows)
