"""Decay: does nnz fall off exponentially along a sequence, and over how many tokens?

    position_fit(run)   a row a layer, and one for their sum: a + b·exp(-p/λ) against a + b·p^(-k)

Both are fitted to the means of bands of positions, without position 0, by least squares; the weight of a band is its
number of tokens over their variance. Given λ (or k) the fit is linear in a and b, so only λ (or k) is searched for
(variable projection: Golub and Pereyra, 1973). Intervals leave out one twentieth of the documents at a time, and each
refit is one Gauss-Newton step: neither the tokens of a document nor the means at two positions are independent. Each
curve has three parameters; they are compared by AICc (Hurvich and Tsai, 1989). Cost: 30 ms for 28 layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.layers import band_sums
from twell.analysis.activity.positions import CLUSTER_SUMS, SUMS
from twell.analysis.statistics import band, distinct, jackknife_error, t_half
from twell.analysis.summaries.read import open_summaries
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run

LEAST_BANDS = 8
DECISIVE = 2.0  # a smaller difference in AICc decides nothing (Burnham and Anderson, 2002, section 2.6)
GRID, FINER = 48, 13  # rates tried at first, and then around the best one
CLOSE = 1e-7  # the search ends when rates are this close, as a share of λ or k


@dataclass(frozen=True)
class Bands:
    """Means by layer and band of positions.

    position [band]: mean position; mean, weight [layer, band]: mean nnz and its weight in a fit; without,
    without_weight [layer, replicate, band]: the same without one replicate (a twentieth of the sequences).
    """

    position: NDArray
    mean: NDArray
    weight: NDArray
    without: NDArray
    without_weight: NDArray


@dataclass(frozen=True)
class Curves:
    """Curves a + b·shape(position, rate), one fitted to each layer [layer].

    residual: the weighted sum of squares; at_end: whether the rate lies at an end of the searched range.
    """

    rate: NDArray
    a: NDArray
    b: NDArray
    residual: NDArray
    at_end: NDArray


Shape = Callable[[NDArray, NDArray], NDArray]


def exponential(position: NDArray, rate: NDArray) -> NDArray:
    """Return exp(-p/λ) at positions p in tokens; rate: ln λ."""
    return np.exp(-position / np.exp(rate))


def power(position: NDArray, rate: NDArray) -> NDArray:
    """Return p^(-k) at positions p in tokens; rate: ln k."""
    return np.exp(-np.exp(rate) * np.log(position))


def position_fit(run: Run) -> pd.DataFrame:
    """Fit an exponential and a power law to mean nnz by position; a row a layer, then layer -1, the sum over layers.
    Columns:

    layer; tokens; bands (of positions, from 1 on); a, b (neurons a token: the level far on, and what comes on top at
    position 0); decay, decay_low, decay_high (λ in tokens, 95 %); r2 (of the bands' means, weighted); power (k of the
    power law), power_r2; aicc (exponential less power law: negative speaks for the exponential); first_ratio (mean of
    position 0 over a); verdict on the better curve: exponential, power law, either (AICc within 2), no decay (its b is
    not above 0 with 95 % confidence), or cannot be told (λ or k is at the end of what was searched: λ half a token to
    four times the longest sequence, k 0.02 to 8; its interval is then 0 to infinity).
    """
    summaries = open_summaries(run)
    rows = band_sums(summaries)
    positions = summaries.columns("positions", "layer", "flagged", "position", *SUMS, *CLUSTER_SUMS)
    layer, later = positions["layer"], ~positions["flagged"] & (positions["position"] > 0)
    first = ~positions["flagged"] & (positions["position"] == 0) & (positions["tokens"] > 0)
    start = np.full(run.layers + 1, np.nan)
    start[layer[first]] = positions["nnz_sum"][first] / positions["tokens"][first]  # layer -1 is the last
    tokens = int(positions["tokens"][later & (layer == -1)].sum())
    fits = _fits(_bands(run, rows, {name: values[later] for name, values in positions.items()}), start)
    frame = pd.DataFrame({"layer": np.append(np.arange(run.layers), -1), "tokens": tokens, **fits})
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": "a + b·exp(-p/λ) over unflagged tokens from position 1 on; intervals from groups of documents, each "
        f"left out once; a difference in AICc under {DECISIVE:g} decides nothing",
        "sequences": run.manifest.sequences,
    }
    return frame


def _bands(run: Run, rows: dict[str, NDArray], positions: dict[str, NDArray]) -> Bands:
    """Return the means by band of each layer and, last, of their sum.

    rows: as `band_sums` returns them; positions: columns of the summary `positions`. Raises Missing where there are too
    few bands to fit three parameters and judge the fit.
    """
    numbers, band_index = distinct(rows["band"])
    if len(numbers) < LEAST_BANDS:
        raise Missing(
            f"{run.name} has unflagged tokens in {len(numbers)} bands of positions: a fit needs at least "
            f"{LEAST_BANDS}, so sequences of 9 tokens or more."
        )
    replicates, replicate = distinct(rows["replicate"])
    n, y = np.zeros((2, run.layers + 1, len(replicates), len(numbers)))
    cell = (rows["layer"], replicate, band_index)
    n[cell], y[cell] = rows["tokens"], rows["nnz_sum"]
    bands = band(positions["position"])
    index = positions["layer"] % (run.layers + 1) * len(numbers) + np.searchsorted(numbers, bands)
    tokens, position, square = (
        np.bincount(index, weights, minlength=n[:, 0].size)[: n[:, 0].size].reshape(n[:, 0].shape)
        for weights in (positions["tokens"], positions["tokens"] * positions["position"], positions["nnz_square"])
    )
    if not (np.isin(bands, numbers).all() and (tokens > 0).all()):
        raise UserError(
            f"Expected tokens in each layer and band of positions in the summaries of {run.path}, got a band without "
            "any: remove their folder to have them made anew, or copy a run without rows again."
        )
    mean = y.sum(axis=1) / tokens
    variance = np.maximum(square / tokens - mean**2, 0)
    variance = np.maximum(variance, variance.mean(axis=1, keepdims=True) * 1e-3 + 1e-12)  # where all counts agree
    remaining = n.sum(axis=1, keepdims=True) - n
    with np.errstate(divide="ignore", invalid="ignore"):
        without = np.where(remaining > 0, (y.sum(axis=1, keepdims=True) - y) / remaining, 0.0)
    # every layer has the same tokens, and so the same mean positions
    return Bands((position / tokens)[-1], mean, tokens / variance, without, remaining / variance[:, None])


def _fits(bands: Bands, starts: NDArray) -> dict[str, NDArray]:
    """Return the columns of position_fit from "bands" to "verdict". starts [layer]: mean nnz at position 0."""
    falling = _search(bands, exponential, 0.5, 4 * bands.position[-1])
    scaling = _search(bands, power, 0.02, 8.0)
    number, half = len(bands.position), float(t_half(bands.without.shape[1] - 1))
    reach = np.where(falling.at_end, np.inf, half * _errors(bands, falling, exponential)[:, 2])
    level = (bands.weight * bands.mean).sum(axis=1) / bands.weight.sum(axis=1)
    total = (bands.weight * (bands.mean - level[:, None]) ** 2).sum(axis=1)
    aicc = number * np.log(np.maximum(falling.residual, 1e-300) / np.maximum(scaling.residual, 1e-300))
    certain = [
        curve.b > half * _errors(bands, curve, shape, fit_rate=False)[:, 1]
        for curve, shape in ((falling, exponential), (scaling, power))
    ]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return {
            "bands": np.full(len(starts), number),
            "a": falling.a,
            "b": falling.b,
            "decay": np.exp(falling.rate),
            "decay_low": np.exp(falling.rate - reach),
            "decay_high": np.where(reach < 100, np.exp(falling.rate + reach), np.inf),
            "r2": np.where(total > 0, 1 - falling.residual / total, np.nan),
            "power": np.exp(scaling.rate),
            "power_r2": np.where(total > 0, 1 - scaling.residual / total, np.nan),
            "aicc": aicc,
            "first_ratio": np.where(falling.a > 0, starts / falling.a, np.nan),
            "verdict": _verdicts(
                np.where(aicc < 0, falling.at_end, scaling.at_end), np.where(aicc < 0, *certain), aicc
            ),
        }


def _verdicts(at_end: NDArray, certain: NDArray, aicc: NDArray) -> NDArray:
    """Return the verdict on each layer.

    at_end, certain [layer]: whether the better curve's rate lies at an end of the searched range, and whether its b is
    above 0 with 95 % confidence; aicc [layer]: AICc of the exponential less that of the power law.
    """
    verdicts = np.where(aicc < 0, "exponential", "power law").astype(object)
    verdicts[np.abs(aicc) < DECISIVE] = "either"
    verdicts[at_end] = "cannot be told"
    verdicts[~certain] = "no decay"
    return verdicts


def _search(bands: Bands, shape: Shape, smallest: float, largest: float) -> Curves:
    """Return the best curve of each layer: over one grid of rates for all layers, then over finer ones around the best.

    shape: of the curve; smallest, largest: the range of λ (or k) that is searched.
    """
    low, high = np.log(smallest), np.log(largest)
    rates, step = np.broadcast_to(np.linspace(low, high, GRID), (len(bands.mean), GRID)), (high - low) / (GRID - 1)
    x = shape(bands.position, rates[:1, :, None])
    layer = np.arange(len(rates))
    while True:  # about 14 rounds: step is finite, because positions are
        a, b, residual = _linear(bands, x)
        best = residual.argmin(axis=1)
        rate = rates[layer, best]
        if not step >= CLOSE:
            break
        rates = np.clip(rate[:, None] + np.linspace(-step, step, FINER), low, high)
        step *= 2 / (FINER - 1)
        x = shape(bands.position, rates[..., None])
    at_end = np.minimum(rate - low, high - rate) < 1e-3
    return Curves(rate, a[layer, best], b[layer, best], residual[layer, best], at_end)


def _linear(bands: Bands, x: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Fit a + b·x to each layer's means for each row of x [layer, row, band].

    Returns a, b and the weighted sum of squared residuals, each [layer, row].
    """
    w, y = bands.weight / bands.weight.sum(axis=1, keepdims=True), bands.mean
    centre, level = (x @ w[..., None])[..., 0], (w * y).sum(axis=1)[:, None]
    dx, dy = x - centre[..., None], y - level
    spread = (dx**2 @ w[..., None])[..., 0]
    b = np.divide((dx @ (w * dy)[..., None])[..., 0], spread, out=np.zeros(spread.shape), where=spread > 1e-30)
    residual = ((dy[:, None] - b[..., None] * dx) ** 2 @ bands.weight[..., None])[..., 0]
    return level - b * centre, b, residual


def _errors(bands: Bands, curves: Curves, shape: Shape, fit_rate: bool = True) -> NDArray:
    """Return jackknife standard errors of a, b and, with `fit_rate`, the rate [layer, parameter].

    Each group of sequences that is left out moves the parameters by one Gauss-Newton step.
    """
    nearby = curves.rate[:, None] + np.array([-1e-4, 0.0, 1e-4])
    below, x, above = np.moveaxis(shape(bands.position, nearby[..., None]), 1, 0)
    slope = curves.b[:, None] * (above - below) / 2e-4
    design = np.stack([np.ones_like(x), x, slope][: 3 if fit_rate else 2], axis=-1)[:, None]
    residual = bands.without - (curves.a[:, None] + curves.b[:, None] * x)[:, None]
    weighted = np.swapaxes(design * bands.without_weight[..., None], -1, -2)
    steps = np.linalg.pinv(weighted @ design) @ (weighted @ residual[..., None])
    return jackknife_error(np.zeros((len(x), design.shape[-1])), np.moveaxis(steps[..., 0], 1, 0))
