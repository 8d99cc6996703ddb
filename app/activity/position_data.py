"""The tables behind the Positions page: mean nnz in bins of positions, relative to the layer's mean, with the fit.

Cost: that of `analysis.by_position` and `analysis.position_fit`, and some milliseconds.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell import analysis
from twell.app.ui.query import Query
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

BINS = 28  # along the logarithmic axis
EXPONENTIAL = ("exponential", "either")  # verdicts under which the exponential describes a layer best, or equally well


def position_bins(run: Run) -> pd.DataFrame:
    """Return mean nnz by layer and bin of positions, relative to the layer's mean past the first position.

    Columns: those of `binned`, and fit (the fitted exponential, relative to the same mean; NaN in layers that it does
    not describe). `fit` is missing if the run is too short for one. Raises Missing if the run holds no unflagged token
    past the first of a sequence.
    """
    positions = analysis.by_position(run)
    if positions["first"].all():
        raise Missing(
            f"{run.name} holds no unflagged token past the first of a sequence, so there is no mean to compare with."
        )
    bins = binned(positions)
    try:
        return _with_fit(bins, analysis.position_fit(run))
    except Missing:
        return bins


def binned(frame: pd.DataFrame) -> pd.DataFrame:
    """Return `analysis.by_position` in geometric bins of positions, relative to the layer's mean past the first one.

    A bin's interval is the weighted mean of its positions' intervals. That is never too narrow, however the positions
    of a sequence depend on each other: the standard error of a mean is at most the mean of the standard errors.

    Args:
        frame: the rows of `analysis.by_position`.

    Returns:
        Columns: layer; first (whether it is position 0, which is a bin of its own); tokens; mean (nnz); low, high (95 %
        interval over layer_mean); position_from, position_to (inclusive); layer_mean (past the first position);
        relative (mean over layer_mean); position (geometric mean). Layers that fire nothing are left out.
    """
    edges = np.unique(np.round(np.geomspace(1, frame["position"].max() + 1, BINS)).astype(int))
    index = np.searchsorted(edges, frame["position"], side="right")  # 0 for the first position
    weight = frame["tokens"].to_numpy(float)
    sums = pd.DataFrame({"layer": frame["layer"], "bin": index, "first": frame["first"], "tokens": weight})
    for name in ("mean", "low", "high"):
        sums[name] = frame[name].fillna(frame["mean"]) * weight
    sums["log"] = np.log(np.maximum(frame["position"], 1)) * weight
    bins = (
        sums.groupby(["layer", "bin"])
        .agg(
            first=("first", "any"),
            tokens=("tokens", "sum"),
            mean=("mean", "sum"),
            low=("low", "sum"),
            high=("high", "sum"),
            log=("log", "sum"),
        )
        .reset_index()
    )
    limits = frame.groupby([frame["layer"], index])["position"].agg(["min", "max"])
    bins[["position_from", "position_to"]] = limits.to_numpy()
    bins[["mean", "low", "high", "log"]] = bins[["mean", "low", "high", "log"]].div(bins["tokens"], axis=0)
    later = bins[~bins["first"]]
    layer_mean = (later["mean"] * later["tokens"]).groupby(later["layer"]).sum() / later.groupby("layer")[
        "tokens"
    ].sum()
    bins["layer_mean"] = bins["layer"].map(layer_mean)
    bins = bins[bins["layer_mean"] > 0].copy()
    bins["relative"], bins["position"] = bins["mean"] / bins["layer_mean"], np.exp(bins["log"])
    bins[["low", "high"]] = bins[["low", "high"]].div(bins["layer_mean"], axis=0)
    return bins.drop(columns=["log", "bin"]).reset_index(drop=True)


def _with_fit(bins: pd.DataFrame, fits: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `binned` with a column `fit`: the exponential of `analysis.position_fit` over layer_mean, in
    layers that it describes."""
    fits = fits[fits["verdict"].isin(EXPONENTIAL)].set_index("layer")
    a, b, decay = (bins["layer"].map(fits[name]) for name in ("a", "b", "decay"))
    fit = (a + b * np.exp(-bins["position"] / decay)) / bins["layer_mean"]
    return bins.assign(fit=fit.where(~bins["first"]))


POSITION_BINS = Query(position_bins)
FITS = Query(analysis.position_fit)
DEFAULT_QUERIES = (POSITION_BINS, FITS)
