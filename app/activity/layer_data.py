"""What the figures of the Layers page draw: how nnz spreads over tokens, and how it goes with the loss.

Cost: that of the answers they are made from, and some milliseconds.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd

from twell import analysis
from twell.app.ui.query import Query
from twell.workbench.run.store import Run

BINS = 43  # of nnz, geometric, at most: the lowest of them hold one count each
LOSSES = ("next", "own")  # the loss of the next token, as predicted at a token, or of the token itself


def spread(run: Run) -> pd.DataFrame:
    """The share of each layer's tokens by nnz, in bins of whole counts that all layers share. Columns: layer; nnz_from,
    nnz_to (both inclusive); share."""
    counted = analysis.layer_histogram(run)
    inner = np.unique(np.round(np.geomspace(1, float(counted["nnz"].max()) + 2, BINS + 1)).astype(int))
    starts = np.array([0, *inner[:-1]])
    place = np.searchsorted(starts, counted["nnz"], side="right") - 1
    sums = counted.groupby(["layer", place])["tokens"].sum().unstack(fill_value=0)
    sums = sums.reindex(columns=range(len(starts)), fill_value=0)
    shares = sums.div(sums.sum(axis=1).clip(lower=1), axis=0).rename_axis("place", axis=1).stack().rename("share")
    found = shares.reset_index()
    found["nnz_from"] = starts[found["place"]]
    found["nnz_to"] = np.array([0, *(inner[1:] - 1)])[found["place"]]
    return found[["layer", "nnz_from", "nnz_to", "share"]]


def layer_rows(run: Run) -> pd.DataFrame:
    """by_layer, and beside it the share of the layer's tokens in each bin of nnz ("nnz 4–5"), as `spread` has them."""
    bins = spread(run)
    names = ["nnz " + span(low, high) for low, high in zip(bins["nnz_from"], bins["nnz_to"], strict=True)]
    wide = bins.assign(name=names).pivot(index="layer", columns="name", values="share")
    table = analysis.by_layer(run).set_index("layer").join(wide[list(dict.fromkeys(names))])
    return table.reset_index()


def span(low: int, high: int) -> str:
    """A range of counts: 4, 4–5."""
    return f"{low}" if low == high else f"{low}–{high}"


def surprisal_bins(run: Run, of: Literal["next", "own"] = "next") -> pd.DataFrame:
    """The answer of `surprisal`, for layers that fire at all and bins that hold tokens, with more columns: layer_mean
    (the layer's mean nnz over all bins); loss (where the bin is drawn: its middle; the last, which is open, where it
    begins); relative, low, high (mean nnz over layer_mean, with its 95 % interval)."""
    frame = analysis.surprisal(run, of=of)
    tokens = frame["tokens"].groupby(frame["layer"]).sum()
    fired = (frame["nnz_mean"] * frame["tokens"]).groupby(frame["layer"]).sum()
    last = frame["bin"] == frame["bin"].max()
    middle = (frame["loss_low"] + frame["loss_high"]) / 2
    frame = frame.assign(
        layer_mean=frame["layer"].map(fired / tokens.clip(lower=1)), loss=middle.where(~last, frame["loss_low"])
    )
    frame = frame[(frame["layer_mean"] > 0) & (frame["tokens"] > 0)].reset_index(drop=True)
    error = frame["nnz_se"].fillna(0)
    for name, shift in (("relative", 0.0), ("low", -1.96), ("high", 1.96)):
        frame[name] = (frame["nnz_mean"] + shift * error) / frame["layer_mean"]
    return frame


SPREAD = Query(spread)
SURPRISAL = Query(surprisal_bins, {"of": LOSSES[0]})
CORRELATION = Query(analysis.surprisal_correlation, {"of": LOSSES[0]})
DEFAULT_QUERIES = (SPREAD, *(query.where(of=loss) for loss in LOSSES for query in (SURPRISAL, CORRELATION)))
