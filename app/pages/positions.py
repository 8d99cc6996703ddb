"""Positions: how activity changes along a sequence, layer by layer."""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.app import parts
from twell.app.figures import small_multiples
from twell.app.position_figures import decays
from twell.app.state import ask, shown
from twell.app.words import number, plural, whole
from twell.workbench.errors import Missing
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


def with_fit(bins: pd.DataFrame, fits: pd.DataFrame) -> pd.DataFrame:
    """The bins with the fitted exponential, relative like them, in layers that it describes as well as anything."""
    fits = fits[fits["verdict"].isin(["exponential", "either"])].set_index("layer")
    told = bins["layer"].map(fits["a"]), bins["layer"].map(fits["b"]), bins["layer"].map(fits["decay"])
    fitted = (told[0] + told[1] * np.exp(-bins["position"] / told[2])) / bins["layer_mean"]
    return bins.assign(fit=fitted.where(~bins["first"]))


def decay(run: Run) -> None:
    """Over how many tokens nnz falls off, layer by layer."""
    fits = ask(run, "position_fit")
    told = fits["verdict"].value_counts()
    said = ", ".join(f"{verdict} {count}" for verdict, count in told.items())
    parts.heading(
        "How fast it falls off",
        "λ of a + b·exp(−p/λ), fitted to bands of positions from 1 on, with 95 % intervals from groups of sequences; "
        f"and whether an exponential or a power law describes the layer better (AICc): {said}. R² is of the bands' "
        "means.",
        fits,
        run,
        "analysis.position_fit(run)",
    )
    parts.draw(decays(fits), "decay", "Length over which nnz falls off, by layer")


def page(run: Run) -> None:
    """A panel a layer, then the fits."""
    frame = ask(run, "by_position")
    bins = binned(frame)
    try:
        bins, fitted = with_fit(bins, ask(run, "position_fit")), " Dotted: the fitted exponential, where it is one."
    except Missing:
        fitted = ""
    sequences = int(frame.loc[frame["first"], "tokens"].max()) if frame["first"].any() else run.manifest.sequences
    apart = (
        "The first position of a sequence (amber) stands apart and is not part of the mean."
        if frame["first"].any()
        else "The first position of every sequence is a special token, and left out."
    )
    parts.heading(
        "Mean nnz by position, relative to the layer's mean",
        f"{plural(sequences, 'sequence')}, up to {whole(frame['position'].max() + 1)} tokens; both axes logarithmic; "
        f"bands are 95 % intervals. {apart}{fitted}",
        frame,
        run,
        "analysis.by_position(run)",
    )
    level = bins.groupby("layer")["layer_mean"].first()
    titles = {int(layer): f"L{layer} · mean {number(mean)}" for layer, mean in level.items()}
    axes = {"x_title": "position, tokens", "y_title": "nnz / layer mean"}
    figure = small_multiples(bins, "position", titles, **axes, log=True, log_y=True)
    parts.draw(figure, "positions", "Mean nnz by position, a panel a layer")
    with parts.told():
        decay(run)


parts.title("Where in a sequence does it fire?")
with parts.told():
    page(shown())
