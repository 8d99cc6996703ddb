"""Values: how often each neuron fires with which value, counted over every token while the model ran.

    neuron_histogram(run)                     every neuron that fired
    neuron_histogram(run, layer=7, neuron=3)  one neuron
    quantile(histogram, values)               the shares of its firings that are not above these values

Recorded with `twell capture --examples K`. Cost: 0.1 s a million rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from twell.analysis.summaries.read import open_summaries
from twell.workbench.errors import UserError
from twell.workbench.run.columns import value_bins
from twell.workbench.run.store import Run

BEGINS = np.array(value_bins())
ENDS = np.append(BEGINS[1:], np.inf)


def neuron_histogram(run: Run, layer: int | None = None, neuron: int | None = None) -> pd.DataFrame:
    """Return how often neurons fire with which values; a row a neuron and bin in which it fired. Columns:

    layer; neuron; low, high (the bin's bounds: values of at least low and below high; two bins to a doubling); fires
    (unflagged tokens on which it fired with such a value); share (of its firings).

    UserError for a layer or a neuron that the model lacks; Missing where the run counts no values by bins.
    """
    if layer is not None and not 0 <= layer < run.layers:
        raise UserError(f"Expected a layer from 0 to {run.layers - 1}, got {layer}.")
    width = run.d_ff if layer is None else run.widths[layer]
    if neuron is not None and not 0 <= neuron < width:
        raise UserError(f"Expected a neuron from 0 to {width - 1}, got {neuron}.")
    equal: dict[str, Any] = {name: one for name, one in (("layer", layer), ("neuron", neuron)) if one is not None}
    rows = open_summaries(run).frame("value_bins", ["layer", "neuron", "bin", "fires"], **equal)
    index = rows["bin"].to_numpy()
    fires = rows["fires"]
    frame = pd.DataFrame(
        {
            "layer": rows["layer"],
            "neuron": rows["neuron"],
            "low": BEGINS[index],
            "high": ENDS[index],
            "fires": fires,
            "share": fires / fires.groupby([rows["layer"], rows["neuron"]]).transform("sum"),
        }
    )
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": "over all unflagged tokens"}
    return frame


def quantile(histogram: pd.DataFrame, values: ArrayLike) -> NDArray[np.float64]:
    """Return the shares of a neuron's firings that are not above `values`, as if even within each bin.

    histogram: a neuron's rows of `neuron_histogram`, of which the last is taken to end at the greatest value
    """
    values = np.asarray(values, float)
    low, share = histogram["low"].to_numpy(float), histogram["share"].to_numpy(float)
    high = np.minimum(histogram["high"].to_numpy(float), np.maximum(values.max(initial=0.0), low * (1 + 1e-6)))
    inside = np.clip((values[:, None] - low) / (high - low), 0.0, 1.0)
    return inside @ share
