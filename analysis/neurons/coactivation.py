"""Coactivation: which neurons fire on the same tokens, from the sample of tokens in `fired`.

    fired_csr(run, layer)   the sparse activations as a scipy CSR matrix, tokens × neurons, and each row's position
    together(run, layer)    the pairs that agree most
    fires_with(run, layer, neuron)   the neurons that fire on the same tokens as one

Pairs are of unflagged tokens: many neurons fire at the first token of every sequence and hardly anywhere else, which
would make all of them fire as one. They are told by phi, as two that fire much share many tokens by chance.
Cost: 0.1 s for 10 000 tokens of 100 non-zeros. It grows with the product of the matrix with itself.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, triu

from twell.analysis.tokens.text_around import position_keys
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run

LEAST = 2  # positions that two neurons share before one is listed as firing with the other
SHOWN = 12  # neighbours
COLUMNS = ["label", "layer", "neuron", "shared", "of", "phi"]


def sampled_layers(run: Run) -> list[int]:
    """Return the layers whose firings the run keeps in `fired`, ascending. Raises Missing where it has no such
    table."""
    layers = set[int]()
    for rows in run.pieces("fired", ["layer"]):
        layers.update(rows["layer"].unique().to_pylist())
    return sorted(layers)


def fired_csr(run: Run, layer: int) -> tuple[csr_matrix, pd.DataFrame]:
    """Return a layer's values as a CSR matrix, float32 [tokens of the sample, d_ff], and a frame with sequence and
    position of each row.

    UserError for a layer whose firings were not sampled; Missing where none were.
    """
    rows = run.rows("fired", [("layer", "=", layer)])
    rows = rows.sort_by([("sequence", "ascending"), ("position", "ascending")])
    if not rows.num_rows:
        recorded = ", ".join(map(str, sampled_layers(run)))
        raise UserError(f"Expected a layer whose activations were kept ({recorded}), got {layer}.")
    neuron, value = (rows[name].combine_chunks() for name in ("neuron", "value"))
    counts = neuron.value_lengths().to_numpy(zero_copy_only=False)
    ends = np.append(0, np.cumsum(counts))
    data = value.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
    matrix = csr_matrix((data, neuron.flatten().to_numpy().astype(np.int32), ends), shape=(rows.num_rows, run.d_ff))
    return matrix, rows.select(["sequence", "position"]).to_pandas()


def as_firings(matrix: csr_matrix, dtype: type[np.number]) -> csr_matrix:
    """Return 1 where a matrix of `fired_csr` has a value: one that float16 rounded to 0 has fired as well."""
    return csr_matrix((np.ones(matrix.nnz, dtype), matrix.indices, matrix.indptr), shape=matrix.shape)


def counted_firings(run: Run, layer: int, dtype: type[np.number]) -> csr_matrix:
    """Return 1 where a neuron fires at an unflagged token of the sample [token, neuron], and 0 elsewhere."""
    matrix, places = fired_csr(run, layer)
    return as_firings(matrix[~_is_flagged(run, places)], dtype)


def _is_flagged(run: Run, places: pd.DataFrame) -> NDArray[np.bool_]:
    """Return whether each token is flagged, as the first of a sequence is, by the rows of single tokens if there are
    any."""
    keys, flagged = position_keys(places), places["position"].to_numpy() == 0
    for rows in run.pieces("activity", ["sequence", "position", "flags"]) if run.has("activity") else ():
        rows = rows.filter(pc.greater(rows["flags"], 0))
        flagged |= np.isin(keys, position_keys(rows))
    return flagged


def together(run: Run, layer: int, limit: int = 100, min_fires: int = 20) -> pd.DataFrame:
    """Return the pairs of neurons of a layer that fire at least `min_fires` times each in the sample, the greatest phi
    first. Columns:

    a, b (neurons, a < b); fires_a, fires_b, both (unflagged tokens of the sample); jaccard (both over either: large by
    chance alone where both fire much); phi (correlation of the two firings); lift (both over what independent neurons
    would share).

    limit: pairs, at most. Missing where under two neurons fire that often, or no firings were sampled; UserError
    for a layer of which none were.
    """
    fired = counted_firings(run, layer, np.int32)
    fires = np.asarray(fired.sum(axis=0)).ravel()
    busy = np.flatnonzero(fires >= min_fires)
    if len(busy) < 2:
        raise Missing(f"Under two neurons of layer {layer} fire {min_fires} times in the sample: ask for fewer.")
    shared = triu(fired[:, busy].T @ fired[:, busy], k=1).tocoo()
    a, b, both = busy[shared.row], busy[shared.col], shared.data.astype(float)
    n, fa, fb = float(fired.shape[0]), fires[a].astype(float), fires[b].astype(float)
    spread = np.sqrt(fa * (n - fa) * fb * (n - fb))
    frame = pd.DataFrame({"a": a, "b": b, "fires_a": fires[a], "fires_b": fires[b], "both": shared.data})
    frame["jaccard"] = both / (fa + fb - both)
    frame["phi"] = np.divide(n * both - fa * fb, spread, out=np.full(len(both), np.nan), where=spread > 0)
    frame["lift"] = n * both / (fa * fb)
    frame = frame.sort_values(["phi", "a", "b"], ascending=[False, True, True]).head(limit).reset_index(drop=True)
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": f"in {int(n):,} unflagged sampled tokens",
        "layer": layer,
    }
    return frame


def fires_with(run: Run, layer: int, neuron: int) -> pd.DataFrame:
    """Return the neurons that fire on the same tokens as one neuron, those first that do so most. Columns:

    label; layer; neuron; shared, of (tokens that fire both; tokens that fire this one, among those looked at); phi
    (correlation of the two firings, NaN where only examples are looked at). attrs: source. Where the run samples the
    layer's firings (--fired), all neurons of the layer are compared on its unflagged tokens; else neurons of all
    layers by the positions of their examples, which are strong firings alone. Missing where the run keeps neither.
    """
    if run.has("fired") and layer in sampled_layers(run):
        return _in_sample(run, layer, neuron)
    if run.none_fired:
        raise Missing(f"No neuron of {run.name} fires, so none fires together with another.")
    if not run.has("examples"):
        raise Missing(
            f"{run.name} keeps no firings of single tokens: capture with --examples 8 or --fired LAYERS (in Python "
            "examples=8, fired=[LAYERS])."
        )
    rows = run.frame("examples", ["layer", "neuron", "sequence", "position"]).drop_duplicates()
    is_own = (rows["layer"] == layer) & (rows["neuron"] == neuron)
    own = rows[is_own][["sequence", "position"]]
    shared = rows[~is_own].merge(own, on=["sequence", "position"])
    counts = shared.groupby(["layer", "neuron"]).size().rename("shared").reset_index()
    counts = counts[counts["shared"] >= LEAST].sort_values(["shared", "layer", "neuron"], ascending=[False, True, True])
    return _labelled(counts.assign(of=len(own), phi=np.nan), "examples")


def _in_sample(run: Run, layer: int, neuron: int) -> pd.DataFrame:
    """Return `fires_with` of a layer whose firings are sampled."""
    fired = counted_firings(run, layer, np.int64)
    n, count = fired.shape[0], np.asarray(fired.sum(axis=0)).ravel().astype(float)
    own = fired[:, [neuron]]
    both = np.asarray((fired.T @ own).todense()).ravel().astype(float)
    spread = np.sqrt(count * (n - count) * count[neuron] * (n - count[neuron]))
    phi = np.divide(n * both - count * count[neuron], spread, out=np.full(len(both), np.nan), where=spread > 0)
    frame = pd.DataFrame({"layer": layer, "neuron": np.arange(run.d_ff), "shared": both.astype(int), "phi": phi})
    frame = frame[(frame["neuron"] != neuron) & (frame["shared"] >= LEAST) & (frame["phi"] > 0)]
    frame = frame.sort_values(["phi", "neuron"], ascending=[False, True]).assign(of=int(count[neuron]))
    return _labelled(frame, "fired")


def _labelled(frame: pd.DataFrame, source: str) -> pd.DataFrame:
    """Return the first rows with the neurons' names."""
    frame = frame.head(SHOWN).reset_index(drop=True)
    labels = [f"L{layer}/N{neuron}" for layer, neuron in zip(frame["layer"], frame["neuron"], strict=True)]
    frame = frame.assign(label=labels)[COLUMNS]
    frame.attrs = {"source": source}
    return frame
