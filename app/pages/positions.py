"""Positions: how activity changes along a sequence, layer by layer."""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.app import parts
from twell.app.figures import small_multiples
from twell.app.state import ask, shown
from twell.app.words import number, plural, whole
from twell.workbench.store import Run

BINS = 28  # along the logarithmic axis


def binned(frame: pd.DataFrame) -> pd.DataFrame:
    """Positions in geometric bins, relative to the layer's mean past the first position.

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
    spans = [
        f"{whole(r.position_from)}–{whole(r.position_to)}"
        if r.position_to > r.position_from
        else whole(r.position_from)
        for r in out.itertuples()
    ]
    out["hover"] = [
        f"position {s}<br>mean nnz {number(r.mean)}, {number(r.relative)} × the layer's<br>n = {whole(r.tokens)}"
        for s, r in zip(spans, out.itertuples(), strict=True)
    ]
    return out.drop(columns=["log", "place"])


def page(run: Run) -> None:
    """A panel a layer."""
    frame = ask(run, "by_position")
    bins = binned(frame)
    sequences = int(frame.loc[frame["first"], "tokens"].max()) if frame["first"].any() else run.manifest.sequences
    apart = (
        "The first position of a sequence (amber) stands apart and is not part of the mean."
        if frame["first"].any()
        else "The first position of every sequence is a special token, and left out."
    )
    parts.heading(
        "Mean nnz by position, relative to the layer's mean",
        f"{plural(sequences, 'sequence')}, up to {whole(frame['position'].max() + 1)} tokens; logarithmic position; "
        f"bands are 95 % intervals. {apart}",
        frame,
        run,
        "analysis.by_position(run)",
    )
    level = bins.groupby("layer")["layer_mean"].first()
    titles = {int(layer): f"L{layer} · mean {number(mean)}" for layer, mean in level.items()}
    figure = small_multiples(bins, "position", titles, "position, tokens", "nnz / layer mean", log=True)
    parts.draw(figure, "positions", "Mean nnz by position, a panel a layer")


parts.title("Where in a sequence does it fire?")
with parts.told():
    page(shown())
