"""Decay: does nnz fall off exponentially along a sequence, and over how many tokens?

    position_fit(run)   a row a layer, and one for their sum: a + b·exp(-p/λ) against a + b·p^(-k)

Both are fitted to the means of bands of positions, position 0 left out, by least squares weighted with the tokens of a
band over their variance. Given λ (or k) the rest is linear, so the best one is searched for alone (variable
projection: Golub and Pereyra, 1973). Intervals leave out one twentieth of the sequences at a time, each refit being one
Gauss-Newton step: the tokens of a sequence are not independent, nor are the means at two positions. The two curves have
three numbers each and are compared by AICc (Hurvich and Tsai, 1989). Cost: 40 ms for 8 layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis import summary
from twell.analysis.statistics import jackknife_error, t_half
from twell.workbench.errors import Missing
from twell.workbench.store import Run

LEAST_BANDS = 8
DECISIVE = 2.0  # a smaller difference in AICc decides nothing (Burnham and Anderson, 2002, section 2.6)
GRID = 160


@dataclass(frozen=True)
class Bands:
    """A layer by band: mean position, mean nnz and weight; means and weights [replicate, band] without a replicate."""

    position: NDArray
    mean: NDArray
    weight: NDArray
    without: NDArray
    without_weight: NDArray


@dataclass(frozen=True)
class Curve:
    """a + b·shape(position, rate), fitted; `left`: weighted squares; `at_end`: the rate is where the search ends."""

    rate: float
    a: float
    b: float
    left: float
    at_end: bool


Shape = Callable[[NDArray, NDArray], NDArray]


def exponential(position: NDArray, rate: NDArray) -> NDArray:
    """exp(-p/λ), rate = ln λ."""
    return np.exp(-position / np.exp(rate))


def power(position: NDArray, rate: NDArray) -> NDArray:
    """p^(-k), rate = ln k."""
    return np.exp(-np.exp(rate) * np.log(position))


def position_fit(run: Run) -> pd.DataFrame:
    """A row a layer, then layer -1, the sum over layers. Columns:

    layer; tokens; bands (of positions, from 1 on); a, b (neurons a token: the level far on, and what comes on top at
    position 0); decay, decay_low, decay_high (λ in tokens, 95 %); r2 (of the bands' means, weighted); power (k of the
    power law), power_r2; aicc (exponential less power law: negative speaks for the exponential); first_ratio (mean of
    position 0 over a); verdict on the better curve: exponential, power law, either (AICc within 2), no decay (its b is
    not above 0 with 95 % confidence), or cannot be told (λ or k is at the end of what was searched: λ half a token to
    four times the longest sequence, k 0.02 to 8; its interval is then 0 to infinity).
    """
    rows = summary.read(run, "position_bands")
    places = summary.read(run, "positions")
    places = places[~places["flagged"]]
    first = places[places["position"] == 0].set_index("layer")
    start = (first["nnz_sum"] / first["tokens"]).reindex([*range(run.layers), -1])
    later = places[places["position"] > 0]
    tokens = int(later.loc[later["layer"] == -1, "tokens"].sum())
    fits = [
        {"layer": layer, "tokens": tokens, **fit}
        for layer, fit in zip(start.index, _fits(_bands(run, rows, later), start.to_numpy()), strict=True)
    ]
    frame = pd.DataFrame(fits)
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": "a + b·exp(-p/λ) over unflagged tokens from position 1 on; intervals from groups of sequences, each "
        f"left out once; a difference in AICc under {DECISIVE:g} decides nothing",
        "sequences": run.manifest.sequences,
    }
    return frame


def _bands(run: Run, rows: pd.DataFrame, places: pd.DataFrame) -> list[Bands]:
    """The means by band of each layer, then of their sum. Missing with too few of them to fit three numbers and judge
    the fit."""
    numbers, band = np.unique(rows["band"], return_inverse=True)
    if len(numbers) < LEAST_BANDS:
        raise Missing(
            f"{run.name} has unflagged tokens in {len(numbers)} bands of positions: a fit needs at least "
            f"{LEAST_BANDS}, so sequences of 9 tokens or more."
        )
    replicates, replicate = np.unique(rows["replicate"], return_inverse=True)
    n, y = np.zeros((2, run.layers + 1, len(replicates), len(numbers)))
    place = (rows["layer"].to_numpy(), replicate, band)  # layer -1 is the last
    n[place], y[place] = rows["tokens"], rows["nnz_sum"]
    place = places["layer"].to_numpy() % (run.layers + 1) * len(numbers)
    place += np.searchsorted(numbers, _band(places["position"].to_numpy()))
    tokens, position, square = (
        np.bincount(place, weights, minlength=n[:, 0].size).reshape(n[:, 0].shape)
        for weights in (places["tokens"], places["tokens"] * places["position"], places["nnz_square"])
    )
    mean = y.sum(axis=1) / tokens
    variance = np.maximum(square / tokens - mean**2, 0)
    variance = np.maximum(variance, variance.mean(axis=1, keepdims=True) * 1e-3 + 1e-12)  # where all counts agree
    left = n.sum(axis=1, keepdims=True) - n
    with np.errstate(divide="ignore", invalid="ignore"):
        without = np.where(left > 0, (y.sum(axis=1, keepdims=True) - y) / left, 0.0)
    each = (position / tokens, mean, tokens / variance, without, left / variance[:, None])
    return [Bands(*arrays) for arrays in zip(*each, strict=True)]


def _band(position: NDArray) -> NDArray:
    return np.where(position < 8, position, np.floor(np.sqrt(8.0 * position))).astype(int)


def _fits(layers: list[Bands], starts: NDArray) -> Iterator[dict[str, object]]:
    """The fit of each layer. Their bands are those of the same tokens, so all searches begin with the same curves."""
    position = layers[-1].position
    grids = []
    for shape, least, most in ((exponential, 0.5, 4 * position[-1]), (power, 0.02, 8.0)):
        rates = np.linspace(np.log(least), np.log(most), GRID)
        grids.append((rates, shape(position, rates[:, None])))
    for bands, start in zip(layers, starts, strict=True):
        yield _fit(bands, start, _search(bands, exponential, *grids[0]), _search(bands, power, *grids[1]))


def _fit(bands: Bands, start: float, falling: Curve, scaling: Curve) -> dict[str, object]:
    half = float(t_half(len(bands.without) - 1))
    reach = np.inf if falling.at_end else half * _errors(bands, falling, exponential)[2]
    total = _squares(bands, np.average(bands.mean, weights=bands.weight))
    aicc = len(bands.mean) * np.log(max(falling.left, 1e-300) / max(scaling.left, 1e-300))
    better, shape = (falling, exponential) if aicc < 0 else (scaling, power)
    certain = better.b > half * _errors(bands, better, shape, moving=False)[1]
    return {
        "bands": len(bands.mean),
        "a": falling.a,
        "b": falling.b,
        "decay": np.exp(falling.rate),
        "decay_low": np.exp(falling.rate - reach),
        "decay_high": np.exp(falling.rate + reach) if reach < 100 else np.inf,
        "r2": 1 - falling.left / total if total > 0 else np.nan,
        "power": np.exp(scaling.rate),
        "power_r2": 1 - scaling.left / total if total > 0 else np.nan,
        "aicc": aicc,
        "first_ratio": start / falling.a if falling.a > 0 else np.nan,
        "verdict": _verdict(better, certain, aicc),
    }


def _verdict(better: Curve, certain: bool, aicc: float) -> str:
    if not certain:
        return "no decay"
    if better.at_end:
        return "cannot be told"
    if abs(aicc) < DECISIVE:
        return "either"
    return "exponential" if aicc < 0 else "power law"


def _search(bands: Bands, shape: Shape, rates: NDArray, x: NDArray) -> Curve:
    """The best curve over a grid of rates, whose curves are given, then twice over a finer one around the best."""
    ends = rates[0], rates[-1]
    for finer in (True, True, False):
        a, b, left = _linear(bands, x)
        best = int(np.argmin(left))
        found = float(rates[best]), float(a[best]), float(b[best]), float(left[best])
        if finer:
            step = rates[1] - rates[0]
            rates = np.linspace(max(ends[0], found[0] - step), min(ends[1], found[0] + step), GRID)
            x = shape(bands.position, rates[:, None])
    return Curve(*found, at_end=min(found[0] - ends[0], ends[1] - found[0]) < 1e-3)


def _linear(bands: Bands, x: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Weighted least squares of the means on each row of x: a, b, the sum of squares left."""
    w, y = bands.weight / bands.weight.sum(), bands.mean
    centre, level = x @ w, w @ y
    dx, dy = x - centre[:, None], y - level
    spread = dx**2 @ w
    b = np.divide(dx @ (w * dy), spread, out=np.zeros(len(x)), where=spread > 1e-30)
    left = (dy - b[:, None] * dx) ** 2 @ bands.weight
    return level - b * centre, b, left


def _squares(bands: Bands, fitted: float) -> float:
    return float((bands.weight * (bands.mean - fitted) ** 2).sum())


def _errors(bands: Bands, curve: Curve, shape: Shape, moving: bool = True) -> NDArray:
    """Jackknife standard errors of a, b and, unless it is held fixed, the rate: a Gauss-Newton step for each group of
    sequences left out."""
    near = curve.rate + np.array([-1e-4, 0.0, 1e-4])
    below, x, above = shape(bands.position, near[:, None])
    design = np.stack([np.ones_like(x), x, curve.b * (above - below) / 2e-4][: 3 if moving else 2], axis=1)
    residual = bands.without - (curve.a + curve.b * x)
    weighted = np.swapaxes(design[None] * bands.without_weight[..., None], 1, 2)
    steps = np.linalg.pinv(weighted @ design) @ weighted @ residual[..., None]
    return jackknife_error(np.zeros(design.shape[1]), steps[..., 0])
