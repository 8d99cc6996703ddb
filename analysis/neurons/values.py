"""The values of one neuron, from what a run keeps of them: the tokens of `fired`, and the examples.

`fired` holds every activation of a stated sample of tokens, so there a neuron that is not listed is known to be silent.
Examples hold a neuron's largest values, some of its firings drawn at random, and its values around each of both. Cost:
one pass over the table's rows of that layer.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from twell import analysis
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run, read_part

SIDE = 16  # tokens that an example's window holds on either side


def sampled(run: Run, layer: int, neuron: int) -> pd.DataFrame:
    """The neuron's values over 0 in a random sample of its firings: those of `fired` where it covers the layer, else
    the examples drawn at random. Column: value. `attrs`: source (fired, examples); tokens (that were looked at; 0 for
    examples)."""
    rows = _fired(run, layer)
    if rows is not None and rows.num_rows:
        found = pd.DataFrame({"value": _of(rows, neuron)["value"].to_numpy(float)})
        found.attrs = {"source": "fired", "tokens": rows.num_rows}
        return found
    kept = analysis.examples(run, layer, neuron)
    found = kept.loc[kept["kind"] == "sample", ["value"]].astype(float).reset_index(drop=True)
    found.attrs = {"source": "examples", "tokens": 0}
    return found


def in_sequence(run: Run, layer: int, neuron: int, sequence: int) -> pd.Series:
    """What is known of the neuron's values in a sequence, by position: 0 where it is known to be silent."""
    found: dict[int, float] = {}
    rows = _fired(run, layer, sequence)
    if rows is not None:
        found |= dict.fromkeys(rows["position"].to_pylist(), 0.0)
        fired = _of(rows, neuron)
        found |= dict(zip(fired["position"], fired["value"].astype(float), strict=True))
    if run.has("examples"):
        wanted = [("layer", "=", layer), ("neuron", "=", neuron), ("sequence", "=", sequence)]
        for position, window in zip(*_columns(run, "examples", ["position", "window"], wanted), strict=True):
            around = range(position - SIDE, position + SIDE + 1)
            found |= {p: v for p, v in zip(around, window, strict=False) if not np.isnan(v)}
    return pd.Series(found, dtype=float).sort_index()


def _columns(run: Run, table: str, columns: list[str], wanted: list[tuple[str, str, int]]) -> list[list[object]]:
    rows = pa.concat_tables([read_part(path, filters=wanted, columns=columns) for path in run.parts(table)])
    return [rows[name].to_pylist() for name in columns]


def _fired(run: Run, layer: int, sequence: int | None = None) -> pa.Table | None:
    """The rows of a layer, or of a sequence in it; None where the run keeps none."""
    if not run.has("fired"):
        return None
    wanted = [("layer", "=", layer), *([("sequence", "=", sequence)] if sequence is not None else [])]
    return pa.concat_tables([read_part(path, filters=wanted) for path in run.parts("fired")])


def _of(rows: pa.Table, neuron: int) -> pd.DataFrame:
    """Where the neuron is among those that fired. Columns: sequence, position, value."""
    rows = rows.combine_chunks()
    lists = rows["neuron"]
    parents = pc.list_parent_indices(lists).to_numpy()
    here = pc.list_flatten(lists).to_numpy() == neuron
    values = pc.list_flatten(rows["value"]).to_numpy()[here]
    rows = rows.select(["sequence", "position"]).take(pa.array(parents[here]))
    return rows.to_pandas().assign(value=values.astype("float32"))


def known(run: Run) -> bool:
    """Whether the run keeps values of single neurons at all."""
    return run.has("fired") or run.has("examples")


def missing(run: Run) -> Missing:
    """Why it keeps none."""
    why = "it is a summary-only run" if run.manifest.summary_only else "it was captured without them"
    return Missing(f"{run.name} keeps no examples of neurons: {why}. Capture with --examples 8 to see them here.")
