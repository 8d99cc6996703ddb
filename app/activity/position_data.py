"""What the panels of the Positions page draw: mean nnz in bins of positions, relative to the layer's mean, and the
fitted exponential beside it. Cost: that of by_position and position_fit, and some milliseconds."""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell import analysis
from twell.app.ui.query import Query
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

BINS = 28  # along the logarithmic axis
DRAWN = ("exponential", "either")  # verdicts under which the exponential describes a layer as well as anything


def panels(run: Run) -> pd.DataFrame:
    """A row a layer and bin of positions. Columns: layer; first (position 0 by itself); tokens; mean (nnz); low, high
    (95 % interval, relative); position_from, position_to; layer_mean (past the first position); relative (mean over
    layer_mean); position (geometric mean of the bin's); fit (the fitted exponential, relative; NaN where it is none;
    not there where the run is too short for a fit)."""
    positions = analysis.by_position(run)
    if positions["first"].all():
        raise Missing(
            f"{run.name} holds no unflagged token past the first of a sequence: there is no mean to relate to."
        )
    bins = binned(positions)
    try:
        return _with_fit(bins, analysis.position_fit(run))
    except Missing:
        return bins


def binned(frame: pd.DataFrame) -> pd.DataFrame:
    """Positions (by_position) in geometric bins, relative to the layer's mean past the first position.

    A bin's interval is the weighted mean of its positions' intervals: never too narrow, because the standard error of
    a mean is at most the mean of the standard errors, however the positions of a sequence hang together.
    """
    edges = np.unique(np.round(np.geomspace(1, frame["position"].max() + 1, BINS)).astype(int))
    place = np.searchsorted(edges, frame["position"], side="right")  # 0 for the first position
    weight = frame["tokens"].to_numpy(float)
    sums = pd.DataFrame({"layer": frame["layer"], "place": place, "first": frame["first"], "tokens": weight})
    for name in ("mean", "low", "high"):
        sums[name] = frame[name].fillna(frame["mean"]) * weight
    sums["log"] = np.log(np.maximum(frame["position"], 1)) * weight
    out = (
        sums.groupby(["layer", "place"])
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
    span = frame.groupby([frame["layer"], place])["position"].agg(["min", "max"])
    out[["position_from", "position_to"]] = span.to_numpy()
    out[["mean", "low", "high", "log"]] = out[["mean", "low", "high", "log"]].div(out["tokens"], axis=0)
    rest = out[~out["first"]]
    level = (rest["mean"] * rest["tokens"]).groupby(rest["layer"]).sum() / rest.groupby("layer")["tokens"].sum()
    out["layer_mean"] = out["layer"].map(level)
    out = out[out["layer_mean"] > 0].copy()
    out["relative"], out["position"] = out["mean"] / out["layer_mean"], np.exp(out["log"])
    out[["low", "high"]] = out[["low", "high"]].div(out["layer_mean"], axis=0)
    return out.drop(columns=["log", "place"]).reset_index(drop=True)


def _with_fit(bins: pd.DataFrame, fits: pd.DataFrame) -> pd.DataFrame:
    """The bins with the fitted exponential, relative like them, in layers that it describes as well as anything."""
    fits = fits[fits["verdict"].isin(DRAWN)].set_index("layer")
    told = bins["layer"].map(fits["a"]), bins["layer"].map(fits["b"]), bins["layer"].map(fits["decay"])
    fitted = (told[0] + told[1] * np.exp(-bins["position"] / told[2])) / bins["layer_mean"]
    return bins.assign(fit=fitted.where(~bins["first"]))


PANELS = Query(panels)
FITS = Query(analysis.position_fit)
DEFAULT_QUERIES = (PANELS, FITS)
