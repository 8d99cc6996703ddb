"""The figure of the Positions page that shows over how many tokens nnz decays along a sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from twell.analysis.activity.position_decay import position_fit
from twell.analysis.activity.positions import by_position
from twell.analysis.figures.labels import number, number_range, whole
from twell.analysis.figures.small_multiples import small_multiples
from twell.analysis.figures.style import dots, finish, log_axis
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

BINS = 28  # along the logarithmic axis
EXPONENTIAL = ("exponential", "either")  # verdicts under which the exponential describes a layer best, or equally well


def position_bins(run: Run) -> pd.DataFrame:
    """Return mean nnz by layer and bin of positions, relative to the layer's mean past the first position.

    Columns: those of `binned`, and fit (the fitted exponential, relative to the same mean; NaN in layers that it does
    not describe). `fit` is missing if the run is too short for one. Raises Missing if the run holds no unflagged token
    past the first of a sequence, or fires nothing there.
    """
    positions = by_position(run)
    if positions["first"].all():
        raise Missing(
            f"{run.name} holds no unflagged token past the first of a sequence, so there is no mean to compare with."
        )
    bins = binned(positions)
    if bins.empty:
        raise Missing(f"{run.name} fires no neuron past the first position, so there is no mean to compare with.")
    try:
        return _with_fit(bins, position_fit(run))
    except Missing:
        return bins


def binned(frame: pd.DataFrame) -> pd.DataFrame:
    """Return `analysis.by_position` in geometric bins of positions, relative to the layer's mean past the first one.

    A bin's interval is the weighted mean of its positions' intervals. That is never too narrow, however the positions
    of a sequence depend on each other: the standard error of a mean is at most the mean of the standard errors. A bin
    with a position that has no interval, as one document alone reaches it or a few are alike there, has none.

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
        sums[name] = frame[name] * weight
    sums["log"] = np.log(np.maximum(frame["position"], 1)) * weight
    bins = (
        sums.groupby(["layer", "bin"])
        .agg(
            first=("first", "any"),
            tokens=("tokens", "sum"),
            mean=("mean", "sum"),
            low=("low", known_sum),
            high=("high", known_sum),
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


def known_sum(values: pd.Series) -> float:
    """Return the sum of values, NaN where one is not known."""
    return float(values.sum(skipna=False))


def _with_fit(bins: pd.DataFrame, fits: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `binned` with a column `fit`: the exponential of `analysis.position_fit` over layer_mean, in
    layers that it describes."""
    fits = described(fits).set_index("layer")
    a, b, decay = (bins["layer"].map(fits[name]) for name in ("a", "b", "decay"))
    fit = (a + b * np.exp(-bins["position"] / decay)) / bins["layer_mean"]
    return bins.assign(fit=fit.where(~bins["first"]))


def described(fits: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `analysis.position_fit` with a λ: layers that an exponential describes, with an interval."""
    return fits[fits["verdict"].isin(EXPONENTIAL) & np.isfinite(fits["decay_high"])]


def decay_lengths(fits: pd.DataFrame) -> go.Figure:
    """Return λ, in tokens, with its interval: a row a layer and one for their sum, with verdict and R² at the right.

    Args:
        fits: the rows of `analysis.position_fit`, of which `described` are drawn.
    """
    drawn = rows = described(fits).reset_index(drop=True).assign(row=lambda frame: range(len(frame)))
    names = ["all layers" if layer < 0 else f"L{layer}" for layer in rows["layer"]]
    figure = go.Figure(
        dots(
            drawn["decay"],
            drawn["row"],
            drawn["decay_low"],
            drawn["decay_high"],
            text=[_tooltip(row) for row in drawn.itertuples()],
            hovertemplate="%{text}<extra></extra>",
        )
    )
    finish(figure, 90 + max(18, min(28, 800 // max(len(rows), 1))) * len(rows), left=68, right=130, top=16)
    step = 1 if len(rows) <= 33 else 2
    figure.update_yaxes(
        tickvals=list(range(len(rows)))[::-1][::step], ticktext=names[::-1][::step], range=[len(rows) - 0.4, -0.6]
    )
    at_right = {"xref": "paper", "x": 1, "xshift": 8, "xanchor": "left", "showarrow": False, "font": {"size": 12}}
    labels = [f"{row.verdict} · R² {number(max(row.r2, 0), 2)}" for row in rows.itertuples()]
    notes = [{**at_right, "text": label, "y": row} for row, label in enumerate(labels)]
    figure.update_layout(annotations=notes)  # all at once: added one by one, each is slower than the one before
    low, high = (float(drawn["decay_low"].min()), float(drawn["decay_high"].max())) if len(drawn) else (1.0, 100.0)
    log_axis(figure, max(low, 1e-3) / 1.3, high * 1.3, "λ, tokens")
    return figure


def _tooltip(row: Any) -> str:
    """Return the tooltip of a row of `analysis.position_fit`, as two lines of HTML."""
    return (
        f"λ {number(row.decay)} (95 % {number(row.decay_low)} to {number(row.decay_high)}) tokens<br>"
        f"level {number(row.a)} neurons, {number(row.b)} more at position 0"
    )


def position_panels(bins: pd.DataFrame) -> go.Figure:
    """Return nnz by position, a panel a layer, both axes logarithmic. bins: the rows of `position_bins`."""
    ranges = [number_range(low, high) for low, high in zip(bins["position_from"], bins["position_to"], strict=True)]
    hover = [
        f"position {positions}<br>mean nnz {number(r.mean)}, {number(r.relative)} × the layer's mean<br>"
        f"n = {whole(r.tokens)}"
        for positions, r in zip(ranges, bins.itertuples(), strict=True)
    ]
    means = bins.groupby("layer")["layer_mean"].first()
    titles = {int(layer): f"L{layer} · mean {number(mean)}" for layer, mean in means.items()}
    axes = {"x_title": "position, tokens", "y_title": "nnz / layer mean"}
    return small_multiples(bins.assign(hover=hover), "position", titles, **axes, log=True, log_y=True)
