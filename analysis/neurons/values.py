"""Values: how strongly one neuron fires, from a run's tables `fired` and `examples`.

    sampled(run, layer, neuron)                 its values in a random sample of its firings
    in_sequence(run, layer, neuron, sequence)   its values along one sequence, as far as the run recorded them

`fired` has every activation of a stated sample of tokens, so a neuron that is not listed for such a token is known to
be silent there. Examples have a neuron's largest values, some of its firings drawn at random, and its values around
these. Cost: one pass over the table's rows of that layer.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from twell.analysis.neurons.examples import examples
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

SIDE = 16  # tokens on each side in an example's window


def sampled(run: Run, layer: int, neuron: int) -> pd.DataFrame:
    """Return the neuron's values above 0 in a random sample of its firings. Column: value.

    From `fired` where it covers the layer, else from the examples drawn at random. `attrs`: source (fired, examples);
    tokens (how many were sampled; 0 for examples). Missing where the run keeps neither.
    """
    rows = _fired(run, layer)
    if rows is not None and rows.num_rows:
        frame = pd.DataFrame({"value": _firings(rows, neuron)["value"].to_numpy(float)})
        frame.attrs = {"source": "fired", "tokens": rows.num_rows}
        return frame
    rows = examples(run, layer, neuron)
    frame = rows.loc[rows["kind"] == "sample", ["value"]].astype(float).reset_index(drop=True)
    frame.attrs = {"source": "examples", "tokens": 0}
    return frame


def in_sequence(run: Run, layer: int, neuron: int, sequence: int) -> pd.Series:
    """Return the neuron's known values in a sequence by position, ascending: 0 where it is known to be silent."""
    values: dict[int, float] = {}
    rows = _fired(run, layer, sequence)
    if rows is not None:
        values |= dict.fromkeys(rows["position"].to_pylist(), 0.0)
        firings = _firings(rows, neuron)
        values |= dict(zip(firings["position"], firings["value"].astype(float), strict=True))
    if run.has("examples"):
        filters = [("layer", "=", layer), ("neuron", "=", neuron), ("sequence", "=", sequence)]
        for row in run.rows("examples", filters, ["position", "window"]).to_pylist():
            around = range(row["position"] - SIDE, row["position"] + SIDE + 1)
            values |= {p: v for p, v in zip(around, row["window"], strict=False) if not np.isnan(v)}
    return pd.Series(values, dtype=float).sort_index()


def _fired(run: Run, layer: int, sequence: int | None = None) -> pa.Table | None:
    """Return the rows of `fired` of a layer, or of one sequence in it; None if the run has no such table."""
    if not run.has("fired"):
        return None
    of_sequence = [("sequence", "=", sequence)] if sequence is not None else []
    return run.rows("fired", [("layer", "=", layer), *of_sequence])


def _firings(rows: pa.Table, neuron: int) -> pd.DataFrame:
    """Return the firings of a neuron among rows of `fired`. Columns: sequence, position, value (float32)."""
    rows = rows.combine_chunks()
    lists = rows["neuron"]
    row_of_firing = pc.list_parent_indices(lists).to_numpy()
    is_neuron = pc.list_flatten(lists).to_numpy() == neuron
    values = pc.list_flatten(rows["value"]).to_numpy()[is_neuron]
    rows = rows.select(["sequence", "position"]).take(pa.array(row_of_firing[is_neuron]))
    return rows.to_pandas().assign(value=values.astype("float32"))


def firings(run: Run, layer: int, neuron: int) -> pd.DataFrame:
    """Return all firings of a neuron that the table `fired` keeps. Columns: sequence, position, value."""
    rows = _fired(run, layer)
    return _firings(rows, neuron) if rows is not None else pd.DataFrame(columns=["sequence", "position", "value"])


def known(run: Run) -> bool:
    """Return whether the run has values of single neurons."""
    return run.has("fired") or run.has("examples")


def missing(run: Run) -> Missing:
    """Return the error that says why the run keeps no examples: that none fired, or what to do to have some."""
    if run.none_fired:
        return Missing(f"{run.name} keeps no examples of neurons: none fired.")
    why = "it is a summary-only run" if run.manifest.summary_only else "it was captured without them"
    return Missing(f"{run.name} keeps no examples of neurons: {why}. Capture with --examples 8 (in Python examples=8).")
