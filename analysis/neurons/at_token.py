"""Which neurons one token fires, and what is known of each.

    neurons_at(run, sequence=0, position=5)   from the run's table `fired`
    beside(table, run)                        the same, with each neuron's density and largest value in a run
    along(run, 0, neurons=((3, 42), (7, 1)))  the values of these neurons over a whole sequence
    firings_at([run], [places])               what many places fire, such as all places of a word: a row a neuron

Cost: the rows of one sequence, and of one token; `beside` reads the summary of neurons.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from twell.analysis.neurons.by_neuron import by_neuron
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run
from twell.workbench.run.tables.absent import ABSENT

ORDERS = {"layer": "layer", "value": "value", "share": "share of largest", "density": "rarest first"}  # of `ordered`


def neurons_at(run: Run, sequence: int, position: int) -> pd.DataFrame:
    """Return the neurons that a token fires, the largest value first. Columns: label (L7/N1234), layer, neuron, value.

    Of the layers that the run's table `fired` covers. Raises Missing if that has no row of this token.
    """
    rows = []
    filters: list[tuple[str, str, object]] = [("sequence", "=", sequence), ("position", "=", position)]
    if run.has("fired"):
        rows = run.rows("fired", filters, ["layer", "neuron", "value"]).to_pylist()
    if not rows and run.has("activity") and not run.rows("activity", filters, ["position"]).num_rows:
        raise Missing(f"{run.name} holds no token at {position} of sequence {sequence}.")
    if not rows:
        raise Missing(f"{run.name} keeps no firings of the token at {position}: {ABSENT['fired'][1]}.")
    lengths = [len(row["neuron"]) for row in rows]
    frame = pd.DataFrame(
        {
            "layer": np.repeat([row["layer"] for row in rows], lengths).astype(np.int64),
            "neuron": np.concatenate([row["neuron"] for row in rows]).astype(np.int64),
            "value": np.concatenate([row["value"] for row in rows]).astype(np.float32),
        }
    )
    labels = [f"L{layer}/N{neuron}" for layer, neuron in zip(frame["layer"], frame["neuron"], strict=True)]
    frame.insert(0, "label", labels)
    frame = frame.sort_values(["value", "layer", "neuron"], ascending=[False, True, True], ignore_index=True)
    layers = ", ".join(str(row["layer"]) for row in sorted(rows, key=lambda row: row["layer"]))
    note = f"every firing of this token in layers {layers}, whatever its flags"
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": note}
    return frame


def beside(table: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Return rows of `neurons_at` with what a run of the same model knows of each neuron.

    Columns more: share (of its largest value in the run; above 1 if it was never as large there), density (share of the
    run's tokens that fire it). Both are empty where the run has no sums of neurons, or the neuron never fired in it.
    """
    try:
        known = by_neuron(run).set_index(["layer", "neuron"])[["value_max", "density"]]
    except Missing:
        return table.assign(share=np.nan, density=np.nan)
    rows = known.reindex(pd.MultiIndex.from_frame(table[["layer", "neuron"]]))
    share = table["value"].to_numpy(float) / rows["value_max"].to_numpy(float)
    return table.assign(share=share, density=rows["density"].to_numpy(float))


def ordered(table: pd.DataFrame, order: str, layer: int | None = None) -> pd.DataFrame:
    """Return rows of `beside` of one layer or of all, the largest value or share first, the least density, or layer by
    layer with the largest value first."""
    rows = table if layer is None else table[table["layer"] == layer]
    keys, rising = (["layer", "value"], [True, False]) if order == "layer" else ([order], [order == "density"])
    return rows.sort_values(keys, ascending=rising, kind="stable", ignore_index=True)


def first_of_layers(table: pd.DataFrame, each: int) -> pd.DataFrame:
    """Return the first `each` rows of every layer, with one column more: of_layer (how many rows the layer has)."""
    counts = table.groupby("layer")["layer"].transform("size")
    return table.assign(of_layer=counts).groupby("layer").head(each).reset_index(drop=True)


def along(run: Run, sequence: int, neurons: tuple[tuple[int, int], ...]) -> pd.DataFrame:
    """Return where these neurons fire in a sequence, as far as the run's table `fired` covers it. Columns: layer,
    neuron, position, value."""
    columns = ["layer", "neuron", "position", "value"]
    layers = sorted({layer for layer, _ in neurons})
    if not layers or not run.has("fired"):
        return pd.DataFrame(columns=columns)
    table = run.rows("fired", [("sequence", "=", sequence), ("layer", "in", layers)], ["sequence", *columns])
    table = table.combine_chunks()
    counts = table["neuron"].combine_chunks().value_lengths().to_numpy(zero_copy_only=False)
    frame = pd.DataFrame({name: np.repeat(table[name].to_numpy(), counts) for name in ("layer", "position")})
    frame["neuron"] = table["neuron"].combine_chunks().flatten().to_numpy()
    frame["value"] = table["value"].combine_chunks().flatten().to_numpy().astype(np.float32)
    is_asked = pd.MultiIndex.from_frame(frame[["layer", "neuron"]]).isin(list(neurons))
    return frame.loc[is_asked, columns].astype(dict.fromkeys(columns[:3], np.int64)).reset_index(drop=True)


def firings_at(runs: Sequence[Run], places: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Return the neurons that the tokens at some places fire, the greatest mean value first; a row a neuron.

    Args:
        runs: runs of one model, such as a run, or readings of several of its passages.
        places: of each run the tokens: columns place (several tokens of one word share it), sequence and position.

    Returns:
        Columns: label; layer; neuron; value (mean over the places, 0 where it is silent); largest (its greatest value);
        fired (places that fire it); places (those that the table `fired` covers in its layer). Raises Missing where no
        run keeps a firing at these places.
    """
    covered, fired, first = list[pd.DataFrame](), list[pd.DataFrame](), 0  # the number of the run's first place
    for run, tokens in zip(runs, places, strict=True):
        if run.has("fired") and len(tokens):
            one_covered, one_fired = _kept_at(run, tokens.assign(place=tokens["place"] + first))
            covered.append(one_covered)
            fired.append(one_fired)
        first += int(tokens["place"].max()) + 1 if len(tokens) else 0
    if not sum(map(len, fired)):
        raise Missing(f"{runs[-1].name} keeps no firings of these tokens: {ABSENT['fired'][1]}.")
    of_layer = pd.concat(covered).groupby("layer")["place"].nunique()
    by_place = pd.concat(fired).groupby(["layer", "neuron", "place"], sort=False)["value"].max().reset_index()
    frame = by_place.groupby(["layer", "neuron"])["value"].agg(["sum", "max", "size"]).reset_index()
    frame = frame.rename(columns={"sum": "value", "max": "largest", "size": "fired"})
    frame["places"] = of_layer.loc[frame["layer"]].to_numpy()
    frame["value"] /= frame["places"]
    frame.insert(0, "label", [f"L{layer}/N{neuron}" for layer, neuron in zip(frame.layer, frame.neuron, strict=True)])
    return frame.sort_values(["value", "layer", "neuron"], ascending=[False, True, True], ignore_index=True)


def _kept_at(run: Run, tokens: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return what the table `fired` keeps of some tokens: a row a token and layer (columns layer, place), and a row a
    firing (columns layer, place, neuron, value). tokens: columns place, sequence, position"""
    where = ["sequence", "position"]
    filters: list[tuple[str, str, object]] = [("sequence", "in", sorted(set(tokens["sequence"].tolist())))]
    rows = run.rows("fired", filters, [*where, "layer", "neuron", "value"])
    asked, kept = (pd.MultiIndex.from_frame(frame) for frame in (tokens[where], rows.select(where).to_pandas()))
    index = asked.get_indexer(kept)
    rows = rows.filter(pa.array(index >= 0)).combine_chunks()
    place = tokens["place"].to_numpy()[index[index >= 0]]
    layer = rows["layer"].to_numpy().astype(np.int64)
    of_firing = pc.list_parent_indices(rows["neuron"]).to_numpy()
    columns: dict[str, NDArray] = {name: pc.list_flatten(rows[name]).to_numpy() for name in ("neuron", "value")}
    fired = pd.DataFrame({"layer": layer[of_firing], "place": place[of_firing], **columns})
    return pd.DataFrame({"layer": layer, "place": place}), fired.astype({"neuron": np.int64, "value": float})
