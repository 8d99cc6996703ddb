"""The tables behind the figures of the Layers page: how nnz is distributed over tokens, and how it follows the loss.

Cost: that of the `twell.analysis` tables they are made from, and some milliseconds.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd

from twell import analysis
from twell.app.ui.query import Query
from twell.workbench.run.store import Run

BINS = 43  # of nnz, at most; geometric, so that the lowest ones hold one count each
LOSSES = ("next", "own")  # the loss of the next token, as predicted at a token, or of the token itself


def nnz_bins(run: Run) -> pd.DataFrame:
    """Return the share of each layer's tokens by nnz, in bins of whole counts that are the same for all layers.

    Columns: layer; nnz_from, nnz_to (neurons, both inclusive); share (of the layer's tokens).
    """
    counts = analysis.layer_histogram(run)
    edges = np.unique(np.round(np.geomspace(1, float(counts["nnz"].max()) + 2, BINS + 1)).astype(int))
    starts = np.array([0, *edges[:-1]])
    ends = np.array([0, *(edges[1:] - 1)])
    index = np.searchsorted(starts, counts["nnz"], side="right") - 1
    sums = counts.groupby(["layer", index])["tokens"].sum().unstack(fill_value=0)
    sums = sums.reindex(columns=range(len(starts)), fill_value=0)
    shares = sums.div(sums.sum(axis=1).clip(lower=1), axis=0).rename_axis("bin", axis=1).stack().rename("share")
    bins = shares.reset_index()
    bins["nnz_from"], bins["nnz_to"] = starts[bins["bin"]], ends[bins["bin"]]
    return bins[["layer", "nnz_from", "nnz_to", "share"]]


def layer_rows(run: Run) -> pd.DataFrame:
    """Return `analysis.by_layer` with a column for each bin of `nnz_bins`, such as "nnz 4–5": its share of tokens."""
    bins = nnz_bins(run)
    names = ["nnz " + number_range(low, high) for low, high in zip(bins["nnz_from"], bins["nnz_to"], strict=True)]
    wide = bins.assign(name=names).pivot(index="layer", columns="name", values="share")
    table = analysis.by_layer(run).set_index("layer").join(wide[list(dict.fromkeys(names))])
    return table.reset_index()


def number_range(low: int, high: int) -> str:
    """Return a range of whole numbers, both ends included: 4, 4–5."""
    return f"{low}" if low == high else f"{low}–{high}"


def surprisal_bins(run: Run, of: Literal["next", "own"] = "next") -> pd.DataFrame:
    """Return `analysis.surprisal` relative to each layer's mean; layers without any nnz and empty bins are left out.

    Args:
        run: the run.
        of: whose loss: the prediction made at a token (next), or the token's own (own).

    Returns:
        The columns of `analysis.surprisal`, and: layer_mean (the layer's mean nnz over all bins); loss (nats, where the
        bin is drawn: its middle; for the last bin, which is open, its lower end); relative, low, high (mean nnz over
        layer_mean, with its 95 % interval).
    """
    frame = analysis.surprisal(run, of=of)
    tokens = frame["tokens"].groupby(frame["layer"]).sum()
    nnz_sum = (frame["nnz_mean"] * frame["tokens"]).groupby(frame["layer"]).sum()
    is_last = frame["bin"] == frame["bin"].max()
    middle = (frame["loss_low"] + frame["loss_high"]) / 2
    frame = frame.assign(
        layer_mean=frame["layer"].map(nnz_sum / tokens.clip(lower=1)), loss=middle.where(~is_last, frame["loss_low"])
    )
    frame = frame[(frame["layer_mean"] > 0) & (frame["tokens"] > 0)].reset_index(drop=True)
    error = frame["nnz_se"].fillna(0)
    for name, shift in (("relative", 0.0), ("low", -1.96), ("high", 1.96)):
        frame[name] = (frame["nnz_mean"] + shift * error) / frame["layer_mean"]
    return frame


NNZ_BINS = Query(nnz_bins)
SURPRISAL = Query(surprisal_bins, {"of": LOSSES[0]})
CORRELATION = Query(analysis.surprisal_correlation, {"of": LOSSES[0]})
DEFAULT_QUERIES = (NNZ_BINS, *(query.where(of=loss) for loss in LOSSES for query in (SURPRISAL, CORRELATION)))
