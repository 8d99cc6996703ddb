"""Curves over positions: fitted to means of bands by weighted least squares, and refitted without each replicate.

Given a rate (λ or k) a curve a + b·shape is linear in a and b, so only the rate is searched for (variable projection:
Golub and Pereyra, 1973); a refit is one Gauss-Newton step. `position_decay` asks what they say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

PAIRS, ROUNDS = 20, 5  # rates that pairs are tried of at first, and how often the grid is made finer around the best
GRID, FINER = 48, 13  # rates tried at first, and then around the best one
CLOSE = 1e-7  # the search ends when rates are this close, as a share of λ or k


@dataclass(frozen=True)
class Bands:
    """Means by layer and band of positions.

    position [band]: mean position; mean, weight [layer, band]: mean nnz and its weight in a fit; without,
    without_weight [layer, replicate, band]: the same without one replicate (a twentieth of the documents); drop,
    drop_error [layer]: mean nnz at early positions less that at late ones; late [layer]: that at late ones; half: of a
    95 % interval, in standard errors; drop_half: that of the drop, which fewer documents may tell.
    """

    position: NDArray
    mean: NDArray
    weight: NDArray
    without: NDArray
    without_weight: NDArray
    drop: NDArray
    drop_error: NDArray
    late: NDArray
    half: float
    drop_half: float


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


def search(bands: Bands, shape: Shape, smallest: float, largest: float) -> Curves:
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


Design = tuple[NDArray, NDArray]  # [layer, band, parameter], and the fitted curve [layer, band]


def curve_design(bands: Bands, curves: Curves, shape: Shape, fit_rate: bool = True) -> Design:
    """Return how each fitted curve changes with a, b and, if `fit_rate`, the rate; and the curve."""
    nearby = curves.rate[:, None] + np.array([-1e-4, 0.0, 1e-4])
    below, x, above = np.moveaxis(shape(bands.position, nearby[..., None]), 1, 0)
    slope = curves.b[:, None] * (above - below) / 2e-4
    columns = [np.ones_like(x), x, slope][: 3 if fit_rate else 2]
    return np.stack(columns, axis=-1), curves.a[:, None] + curves.b[:, None] * x


def refits(bands: Bands, design: NDArray, curve: NDArray) -> tuple[NDArray, NDArray]:
    """Return how far one Gauss-Newton step moves the parameters of each curve without each replicate [layer, replicate,
    parameter], and the weighted sum of squared residuals that it leaves [layer, replicate]."""
    residual = bands.without - curve[:, None]
    weighted = np.swapaxes(design[:, None] * bands.without_weight[..., None], -1, -2)
    steps = (np.linalg.pinv(weighted @ design[:, None]) @ (weighted @ residual[..., None]))[..., 0]
    left = residual - (design[:, None] @ steps[..., None])[..., 0]
    return steps, (bands.without_weight * left**2).sum(axis=-1)


def double_exponential(bands: Bands) -> tuple[Design, NDArray]:
    """Return the best sum of two exponentials of each layer, as `curve_design` does, and its weighted sum of squares.

    Pairs of rates are tried on a grid, which becomes finer around the best pair of each layer.
    """
    low, high = np.log(0.5), np.log(4 * bands.position[-1])
    grid, step = np.linspace(low, high, PAIRS), (high - low) / (PAIRS - 1)
    pairs = np.broadcast_to(np.array(list(combinations(grid, 2))), (len(bands.mean), PAIRS * (PAIRS - 1) // 2, 2))
    near = np.array(list(product((-0.5, 0.0, 0.5), repeat=2)))
    layer = np.arange(len(bands.mean))
    for turn in range(ROUNDS + 1):
        x = np.stack(
            [
                np.ones((*pairs.shape[:2], len(bands.position))),
                *(exponential(bands.position, pairs[..., i, None]) for i in (0, 1)),
            ],
            axis=-1,
        )
        weighted = np.swapaxes(x * bands.weight[:, None, :, None], -1, -2)
        coefficients = np.linalg.pinv(weighted @ x) @ (weighted @ bands.mean[:, None, :, None])
        curve = (x @ coefficients)[..., 0]
        residual = (bands.weight[:, None] * (bands.mean[:, None] - curve) ** 2).sum(axis=-1)
        best = residual.argmin(axis=1)
        chosen = pairs[layer, best]
        if turn < ROUNDS:
            pairs = np.clip(chosen[:, None] + near * step, low, high)
            step /= 2
    columns, scale = x[layer, best], coefficients[layer, best, :, 0]
    slopes = [scale[:, i + 1, None] * columns[..., i + 1] * bands.position / np.exp(chosen[:, i, None]) for i in (0, 1)]
    return (np.concatenate([columns, np.stack(slopes, axis=-1)], axis=-1), curve[layer, best]), residual[layer, best]
