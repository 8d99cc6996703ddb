"""The few estimators behind the tables, over numpy arrays. None knows what a run is.

Standard errors are clustered by sequence, because the tokens of one sequence are not independent.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95


def ratio_error(n: ArrayLike, n2: ArrayLike, y: ArrayLike, y2: ArrayLike, ny: ArrayLike, g: ArrayLike) -> NDArray:
    """Standard error of the mean Σy_g / Σn_g over g clusters, from Σn_g, Σn_g², Σy_g, Σy_g², Σy_g·n_g and their number.

    The linearised (cluster-robust) variance of a ratio, G/(G - 1) · Σ (y_g - m·n_g)² / (Σ n_g)²: Cochran, Sampling
    Techniques (1977), section 6.3; as the cluster-robust variance of a mean, Cameron and Miller (2015),
    A Practitioner's Guide to Cluster-Robust Inference. NaN with fewer than two clusters.
    """
    n, n2, y, y2, ny, g = (np.asarray(values, dtype=float) for values in (n, n2, y, y2, ny, g))
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = y / n
        residual = np.maximum(y2 - 2 * mean * ny + mean**2 * n2, 0)
        return np.where(g > 1, np.sqrt(g / (g - 1) * residual) / n, np.nan)


def mean_error(n: ArrayLike, y: ArrayLike, y2: ArrayLike) -> NDArray:
    """Standard error of a mean of n independent values, from Σy and Σy². NaN with fewer than two."""
    return ratio_error(n, n, y, y2, y, n)


def t_half(degrees: ArrayLike) -> NDArray:
    """Half the width, in standard errors, of a 95 % interval with this many degrees of freedom."""
    few, place = np.unique(np.asarray(degrees, dtype=float), return_inverse=True)  # whose quantiles are slow to find
    return np.where(few > 0, stdtrit(np.maximum(few, 1), (1 + CONFIDENCE) / 2), np.nan)[place].reshape(
        np.shape(degrees)
    )


def jackknife_error(estimate: ArrayLike, without: ArrayLike) -> NDArray:
    """Standard error from the estimates that leave one group of sequences out each (the first axis of `without`).

    The delete-a-group jackknife, √((R - 1)/R · Σ (θ_r - θ)²): Kott (2001), Journal of Official Statistics 17.
    NaN with fewer than two groups.
    """
    without = np.asarray(without, dtype=float)
    groups = len(without)
    if groups < 2:
        return np.full(np.shape(estimate), np.nan)
    return np.sqrt((groups - 1) / groups * ((without - np.asarray(estimate)) ** 2).sum(axis=0))


def distinct(numbers: ArrayLike) -> tuple[NDArray, NDArray]:
    """The different ones of small whole numbers, from 0 up, ascending; and the place of each number among them.
    np.unique without sorting."""
    numbers = np.asarray(numbers)
    there = np.bincount(numbers) > 0
    return np.flatnonzero(there), (np.cumsum(there) - 1)[numbers]


def quantiles(values: NDArray, counts: NDArray, shares: ArrayLike) -> NDArray:
    """Exact quantiles of a histogram (values ascending): the least value that at least the share of counts reaches."""
    up_to = np.cumsum(counts)
    needed = np.ceil(np.asarray(shares) * up_to[-1] - 1e-9)
    return values[np.searchsorted(up_to, np.maximum(needed, 1))]


def table_spearman(counts: NDArray) -> NDArray:
    """Spearman's rank correlation from tables of counts [..., a, b], ties at their mid-rank.

    NaN where either margin has one class only.
    """
    counts = np.asarray(counts, dtype=float)
    rows, columns = counts.sum(axis=-1), counts.sum(axis=-2)
    a, b = _centred_ranks(rows), _centred_ranks(columns)
    joint = (a * (counts @ b[..., None])[..., 0]).sum(axis=-1)
    spread = (rows * a**2).sum(axis=-1) * (columns * b**2).sum(axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(spread > 0, joint / np.sqrt(spread), np.nan)


def _centred_ranks(margin: NDArray) -> NDArray:
    return np.cumsum(margin, axis=-1) - margin / 2 - margin.sum(axis=-1, keepdims=True) / 2


def fisher_interval(r: ArrayLike, error: ArrayLike, degrees: ArrayLike) -> tuple[NDArray, NDArray]:
    """A 95 % interval of a correlation whose atanh has this standard error and degrees of freedom."""
    with np.errstate(divide="ignore", invalid="ignore"):
        middle, half = np.arctanh(r), t_half(degrees) * np.asarray(error)
    return np.tanh(middle - half), np.tanh(middle + half)


def shrink(mean: NDArray, error: NDArray) -> tuple[NDArray, NDArray]:
    """Empirical Bayes, normal-normal: means drawn towards their common mean the more, the larger their standard error.

    With means y_i ~ N(θ_i, s_i²) and θ_i ~ N(μ, τ²): τ² is the root of Σ (y_i - μ)² / (s_i² + τ²) = n - 1, 0 if it has
    none (Paule and Mandel, 1982), μ the mean weighted by 1 / (s_i² + τ²); returns E θ_i and its posterior sd (Efron and
    Morris, 1975). The error of μ and τ² is not counted: with many means it is small.
    """
    variance = error**2

    def pooled(between: float) -> tuple[float, float]:
        weight = 1 / (variance + between)
        centre = float((weight * mean).sum() / weight.sum())
        return centre, float((weight * (mean - centre) ** 2).sum()) - (len(mean) - 1)

    low, high = 0.0, float(np.ptp(mean) ** 2) + 1e-12
    if pooled(0.0)[1] <= 0:
        high = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if pooled(middle)[1] > 0 else (low, middle)
    centre, _ = pooled(high)
    kept = high / (high + variance)
    return centre + kept * (mean - centre), np.sqrt(kept * variance)


def student_p(r: float, n: int) -> float:
    """Two-sided p of a Pearson correlation r of n pairs, from Student's t with n - 2 degrees of freedom."""
    if abs(r) >= 1:
        return 0.0
    return float(2 * stdtr(n - 2, -abs(r) * np.sqrt((n - 2) / (1 - r * r))))


def permutation_p(x: NDArray, y: NDArray) -> float:
    """Two-sided exact p of a Pearson correlation: the share of all n! pairings with one as far from 0, or farther.

    For n up to 11. The last seven places are permuted in one array, the others one by one.
    """
    a, b = x - x.mean(), y - y.mean()
    n = len(a)
    inner = min(n, 7)
    orders = np.array(list(permutations(range(inner))))
    reach = abs(a @ b) * (1 - 1e-12)
    hits = total = 0
    for outer in permutations(range(n), n - inner):
        rest = b[[i for i in range(n) if i not in outer]]
        sums = a[: n - inner] @ b[list(outer)] + rest[orders] @ a[n - inner :]
        hits += int((np.abs(sums) >= reach).sum())
        total += len(orders)
    return hits / total
