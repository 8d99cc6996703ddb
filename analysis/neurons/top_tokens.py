"""Top tokens: what stands where each neuron has its largest values, for all neurons at once; and why some never fire.

    top_tokens(run)                          the tokens at each neuron's largest values
    weight_norms(run, "data/demo-model", 3)  the lengths of a layer's gate and down rows
    dead_kinds(run, "data/demo-model")       how many of the dead have lost their weights, and how many have them still

The values and their places are the run's examples (`--examples K`); the norms are the model's, read from its weights.
Cost: one pass over three columns of the run; 0.5 s a million tokens and 8 layers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.neurons.by_neuron import by_neuron
from twell.analysis.neurons.logit_lens import CheckpointTensors, as_float32
from twell.analysis.neurons.values import missing
from twell.analysis.tokens.text_around import position_keys
from twell.analysis.tokens.token_text import token_text
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

EACH = 4  # tokens of a neuron
READABLE = 1e8  # weights whose lengths are computed while a page is drawn, some 0.3 s
GONE = 0.25  # of the median length of neurons that fire: weights below that have decayed away


def top_tokens(run: Run) -> pd.DataFrame:
    """Return the tokens at the largest values of each neuron that has examples, by layer and index. Columns:

    layer; neuron; rank (0 to 3: different tokens, the largest value first); token_id; text; value. Missing where the
    run keeps no examples, or no rows of single tokens.
    """
    if not run.has("examples"):
        raise missing(run)
    names = ["layer", "neuron", "kind", "value", "sequence", "position"]
    rows = run.frame("examples", names)
    rows = rows[rows["kind"] == "top"].sort_values(["layer", "neuron", "value"], ascending=[True, True, False])
    rows["token_id"] = _tokens_at(run, position_keys(rows))
    rows = rows[rows["token_id"] >= 0].drop_duplicates(["layer", "neuron", "token_id"])
    rank = rows.groupby(["layer", "neuron"]).cumcount()
    rows = rows.assign(rank=rank)[rank < EACH]
    ids, back = np.unique(rows["token_id"], return_inverse=True)
    rows["text"] = np.asarray(token_text(run, ids, spelled=True), object)[back]
    return rows[["layer", "neuron", "rank", "token_id", "text", "value"]].reset_index(drop=True)


def _tokens_at(run: Run, keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the token id at each key of sequence and position; -1 where the run has no row."""
    wanted, back = np.unique(keys, return_inverse=True)
    tokens = np.full(len(wanted), -1, np.int64)
    for part in run.pieces("activity", ["sequence", "position", "token_id"]):
        part_keys = position_keys(part)
        at = np.searchsorted(wanted, part_keys)
        hit = (at < len(wanted)) & (wanted[np.minimum(at, len(wanted) - 1)] == part_keys)
        tokens[at[hit]] = part["token_id"].to_numpy()[hit]
    return tokens[back]


def weight_norms(run: Run, folder: str, layer: int) -> pd.DataFrame:
    """Return the lengths of the weights of a layer's neurons, from the model in `folder`. Columns:

    layer; neuron; gate_norm, down_norm (lengths of the gate row and the down row, as shares of their medians over the
    neurons that fire in the run); gone (both are below a quarter: what the neuron reads and writes has decayed away).
    """
    weights = CheckpointTensors(Path(folder))
    gate, down = weights.gate(layer), weights.down(layer)
    width = int(run.widths[layer])
    if len(gate) != width or down.shape[1] != width:
        raise Missing(f"The weights in {folder} are not this run's: expected {width} neurons, got {len(gate)}.")
    fires = by_neuron(run, layer=layer)["fires"].to_numpy() > 0
    frame = pd.DataFrame({"layer": layer, "neuron": np.arange(width)})
    for name, rows in (("gate_norm", gate), ("down_norm", down.T)):
        lengths = np.linalg.norm(as_float32(rows), axis=1)
        typical = float(np.median(lengths[fires] if fires.any() else lengths))
        frame[name] = lengths / max(typical, 1e-12)
    return frame.assign(gone=(frame[["gate_norm", "down_norm"]] < GONE).all(axis=1))


def dead_kinds(run: Run, folder: str) -> tuple[int, int]:
    """Return how many of the neurons that never fired have lost their weights (`gone`), and how many have them still.

    folder: the model's weights. Raises Missing where they cannot be read, or are more than a moment's reading, or where
    no neuron fires to compare them with.
    """
    if 2 * run.neurons * int(run.manifest.model["d_model"]) > READABLE:
        raise Missing(f"The weights of {run.name} are too many to read while a page is drawn.")
    gone, dead = 0, 0
    for layer in range(run.layers):
        silent = by_neuron(run, layer=layer)["fires"].to_numpy() == 0
        dead += int(silent.sum())
        gone += int(weight_norms(run, folder, layer)["gone"].to_numpy()[silent].sum()) if silent.any() else 0
    if dead == run.neurons:
        raise Missing(f"No neuron of {run.name} fires, so that weights of dead ones have none to be compared with.")
    return gone, dead - gone
