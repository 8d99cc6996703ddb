"""Neurons: how often each fires, how strongly, and on what.

    by_neuron(run)           every neuron, including those that never fired
    by_neuron(run, layer=7)  the neurons of one layer

The kernel counted unflagged tokens while the model ran. Cost: 100 ms for 45 000 neurons.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pandas.api.extensions import ExtensionArray

from twell.analysis.activity.layers import of_unflagged, unflagged_tokens
from twell.analysis.summaries.read import Summaries, open_summaries
from twell.analysis.tokens.token_text import token_text
from twell.workbench.errors import UserError
from twell.workbench.run.checks.uncounted import no_counted_token
from twell.workbench.run.schema import NEVER_SEQUENCE, NEVER_TOKEN_MAX, NEVER_TOKEN_MIN, VALUE_SCALE
from twell.workbench.run.store import Run

NEVER: dict[str, float] = {
    "fires": 0,
    "value_sum": 0,
    "value_max": np.nan,
    "token_min": NEVER_TOKEN_MIN,
    "token_max": NEVER_TOKEN_MAX,
    "first_sequence": NEVER_SEQUENCE,
}


def by_neuron(run: Run, layer: int | None = None) -> pd.DataFrame:
    """Return how often and how strongly each neuron fires; a row a neuron, by layer and index. Columns:

    label (L7/N1234); layer; neuron; fires (tokens); tokens (counted out of); density (fires / tokens); value_mean (over
    the tokens that fired it); value_max; one_token (every token that fired it is the same); token_text (that token);
    first_sequence (in which it fired; -1: never). Values are empty where it never fired.

    layer: that layer alone; None: all. UserError for one that the model lacks; Missing where the run counted no
    neurons or no unflagged token.
    """
    if layer is not None and not 0 <= layer < run.layers:
        raise UserError(f"Expected a layer from 0 to {run.layers - 1}, got {layer}.")
    summaries = open_summaries(run)
    tokens = unflagged_tokens(summaries)
    if not tokens:
        raise no_counted_token(run)
    layers = range(run.layers) if layer is None else range(layer, layer + 1)
    widths = run.widths[layers.start : layers.stop]
    rows = _all_neurons(summaries, layers, widths)
    fires = rows["fires"]
    with np.errstate(invalid="ignore"):
        value_mean = rows["value_sum"] / VALUE_SCALE / fires
    one_token = (fires > 0) & (rows["token_min"] == rows["token_max"])
    text = np.full(len(fires), "", object)
    text[one_token] = token_text(run, rows["token_min"][one_token], spelled=True)
    frame = pd.DataFrame(
        {
            "label": _labels(layers, widths),
            "layer": np.repeat(layers, widths),
            "neuron": np.concatenate([np.arange(width) for width in widths]),
            "fires": fires,
            "tokens": tokens,
            "density": fires / tokens,
            "value_mean": value_mean,
            "value_max": rows["value_max"],
            "one_token": one_token,
            "token_text": text,
            "first_sequence": rows["first_sequence"],
        }
    )
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": f"over {of_unflagged(tokens, run.manifest.sequences)}",
    }
    return frame


def _all_neurons(summaries: Summaries, layers: range, widths: NDArray) -> dict[str, NDArray]:
    """Return the columns of the summary `neurons` for every neuron of these layers, by layer and index.

    Neurons that never fired have no row in the summary; NEVER has their values.
    """
    rows, first = summaries.columns("neurons", "layer", "neuron", *NEVER), np.cumsum(widths) - widths
    selected = slice(*np.searchsorted(rows["layer"], (layers.start, layers.stop)))
    index = first[rows["layer"][selected] - layers.start] + rows["neuron"][selected]
    columns = {}
    for name, never in NEVER.items():
        columns[name] = np.full(widths.sum(), never, np.float32 if name == "value_max" else np.int64)
        columns[name][index] = rows[name][selected]
    return columns


def _labels(layers: range, widths: NDArray) -> ExtensionArray:
    """Return the labels L0/N0, L0/N1, … of the neurons of these layers."""
    heads, tails = ([f"{name}{number}" for number in range(n)] for name, n in (("L", layers.stop), ("/N", max(widths))))
    heads = pa.array(heads).take(pa.array(np.repeat(layers, widths)))
    tails = pa.array(tails).take(pa.array(np.concatenate([np.arange(width) for width in widths])))
    return pc.binary_join_element_wise(heads, tails, "").to_pandas().array


def parse_neuron(label: str | None, run: Run) -> tuple[int, int] | None:
    """Return layer and index of a neuron like `L7/N1234` or `7 1234`; None where the run has no such neuron."""
    match = re.fullmatch(r"\s*L?(\d{1,4})\s*[/ ,:]\s*N?(\d{1,7})\s*", label or "", flags=re.ASCII | re.IGNORECASE)
    if match is None:
        return None
    layer, neuron = int(match[1]), int(match[2])
    return (layer, neuron) if layer < run.layers and neuron < run.widths[layer] else None


def last_neuron(run: Run) -> str:
    """Return the name of a run's last neuron."""
    return f"L{run.layers - 1}/N{run.widths[-1] - 1}"
