"""Estimators behind the tables: functions of numpy arrays, which know nothing of runs.

Standard errors are clustered by document, because neither the tokens of one document nor its sequences are
independent; degrees of freedom are those of Kish's effective number of clusters, which differ in size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

CONFIDENCE = 0.95
SMALL = 2**20  # numbers up to this one are told apart by counting, larger ones by sorting
EACH = 8  # each number below this one is a band of its own
TRENDED, FITTED, STEPS = 30, 2048, 60  # variances of a trend, least and most; steps of its fit, where seven are usual


def effective(n: ArrayLike, n2: ArrayLike) -> NDArray:
    """Return Kish's effective number of clusters of sizes n_g, (Σ n_g)² / Σ n_g², from Σ n_g and Σ n_g²; NaN of none.

    As many clusters of one size would tell a mean as well: Kish (1965), Survey Sampling, section 11.7.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(n, dtype=float) ** 2 / np.asarray(n2, dtype=float)


def ratio_error(n: ArrayLike, n2: ArrayLike, y: ArrayLike, y2: ArrayLike, ny: ArrayLike) -> NDArray:
    """Return the standard error of the mean Σy_g / Σn_g over clusters, from Σn_g, Σn_g², Σy_g, Σy_g², Σy_g·n_g.

    The linearised (cluster-robust) variance of a ratio, k/(k - 1) · Σ (y_g - m·n_g)² / (Σ n_g)²: Cochran, Sampling
    Techniques (1977), section 6.3; as the cluster-robust variance of a mean, Cameron and Miller (2015),
    A Practitioner's Guide to Cluster-Robust Inference. k is Kish's effective number of clusters, their number where all
    are of one size. NaN with one cluster.
    """
    n, n2, y, y2, ny = (np.asarray(values, dtype=float) for values in (n, n2, y, y2, ny))
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, k = y / n, effective(n, n2)
        residual = np.maximum(y2 - 2 * mean * ny + mean**2 * n2, 0)
        return np.where(k > 1, np.sqrt(k / (k - 1) * residual) / n, np.nan)


def centred_error(
    sums: Sequence[ArrayLike], beside: ArrayLike, n_beside: ArrayLike, all_square: ArrayLike, all_n: ArrayLike
) -> NDArray:
    """Return the standard error of a mean Σy_g / Σn_g less the mean of all values, which is 0 in the sample.

    sums: the five of `ratio_error`; beside, n_beside: Σ y_g·a_g and Σ n_g·a_g, a_g being the sum of all values of
    cluster g; all_square: Σ a_g²; all_n: the number of all values. As `ratio_error`, with the residual of a cluster
    taken less its a_g / all_n: both means come from the same clusters and move together.
    """
    n, n2, y, y2, ny = (np.asarray(values, dtype=float) for values in sums)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, k = y / n, effective(n, n2)
        residual = np.maximum(y2 - 2 * mean * ny + mean**2 * n2, 0) / n**2
        together = (np.asarray(beside) - mean * np.asarray(n_beside)) / n / all_n
        variance = np.maximum(residual - 2 * together + np.asarray(all_square) / np.asarray(all_n) ** 2, 0)
        return np.where(k > 1, np.sqrt(k / (k - 1) * variance), np.nan)


def pooled_variance(
    variance: ArrayLike, n: ArrayLike, clusters: ArrayLike, mean: ArrayLike, prior: float
) -> tuple[NDArray, NDArray]:
    """Return the variance of each of many means, drawn towards what means like it have, and its degrees of freedom.

    variance [m]: of each mean, from its own clusters, NaN where they tell none; n [m]: values behind it; clusters [m]:
    Kish's effective number of its clusters; mean [m]: the means; prior: clusters that the common variance counts as.

    A mean of few clusters has a poor variance, and a wrong one where values are skewed: a mean that is low by chance
    comes with a variance that is too small. So both are mixed by degrees of freedom, which add up: Smyth (2004), Linear
    models and empirical Bayes methods. The common variance of one value is not one number. Counts vary more where there
    are more of them, and values of one cluster go together, so a mean of few large clusters varies more than one of
    many small ones. It is fitted as exp(a + b·mean + c·log(n / clusters)) over all means: limma's trend (Law and
    others, 2014, voom), with the correlation within clusters pooled. To take the larger of both would be biased. NaN
    throughout where fewer than two means have two clusters.
    """
    variance, n, clusters, mean = (np.asarray(values, dtype=float) for values in (variance, n, clusters, mean))
    estimable = (clusters > 1) & np.isfinite(variance)
    if estimable.sum() < 2:
        return np.full(len(n), np.nan), np.full(len(n), np.nan)
    degrees = np.where(estimable, clusters - 1, 0.0)
    own = np.where(estimable, n * variance, 0.0)
    common = _common_variance(own, degrees, mean, np.log(n / clusters))
    return (own * degrees + common * prior) / (degrees + prior) / n, degrees + prior


def _common_variance(own: NDArray, degrees: NDArray, mean: NDArray, size: NDArray) -> NDArray:
    """Return exp(a + b·mean + c·size) fitted to variances `own` by degrees of freedom; one number for under TRENDED.

    By the quasi-likelihood of a gamma distribution, which takes the variances' mean alone as known: McCullagh and
    Nelder (1989), Generalized Linear Models, chapter 8. Beyond the inner 98 % of the means the trend is level. Of more
    than FITTED variances every second, third, … is fitted.
    """
    told = np.flatnonzero(degrees)
    level = float((own * degrees).sum() / degrees.sum())
    if len(told) < TRENDED or not level > 0:
        return np.full(len(own), level)
    told = told[:: -(-len(told) // FITTED)]
    design = np.stack([np.ones(len(own)), np.clip(mean, *np.quantile(mean[told], [0.01, 0.99])), size])
    x, y, weight = design[:, told], own[told], degrees[told]
    beta = np.array([np.log(level), 0.0, 0.0])
    for _ in range(STEPS):  # Newton's: what is minimised, Σ weight · (y / fitted + log fitted), is convex
        ratio = weight * y * np.exp(-beta @ x)
        step = np.linalg.lstsq((x * ratio) @ x.T, x @ (ratio - weight), rcond=None)[0]
        step /= max(1.0, np.abs(step).max())
        beta += step
        if np.abs(step).max() < 1e-9:
            break
    return np.exp(beta @ design)


def mean_error(n: ArrayLike, y: ArrayLike, y2: ArrayLike) -> NDArray:
    """Return the standard error of a mean of n independent values, from Σy and Σy². NaN with fewer than two values."""
    return ratio_error(n, n, y, y2, y)


def welch_degrees(errors: ArrayLike, degrees: ArrayLike) -> NDArray:
    """Return the degrees of freedom of a difference of independent estimates (Satterthwaite, 1946; Welch, 1947), from
    their standard errors and degrees of freedom, both [estimate, ...]; without any error, the least of theirs."""
    variance = np.asarray(errors, dtype=float) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        welch = variance.sum(axis=0) ** 2 / (variance**2 / np.asarray(degrees, dtype=float)).sum(axis=0)
    return np.where(variance.any(axis=0), welch, np.min(degrees, axis=0))


def t_half(degrees: ArrayLike) -> NDArray:
    """Return half the width, in standard errors, of a 95 % interval with this many degrees of freedom; NaN under one,
    where nothing can be said."""
    degrees = np.asarray(degrees)
    integral = degrees.ndim == 1 and np.issubdtype(degrees.dtype, np.integer)
    values, index = distinct(np.maximum(degrees, 0)) if integral else (degrees, ...)  # quantiles are slow to compute
    return np.where(values >= 1, stdtrit(np.maximum(values, 1), (1 + CONFIDENCE) / 2), np.nan)[index]


def jackknife_error(estimate: ArrayLike, without: ArrayLike) -> NDArray:
    """Return the jackknife standard error of an estimate, from estimates that each leave one group of documents out.

    estimate [...]: over all groups; without [group, ...]: without each group. √((R - 1)/R · Σ (θ_r - θ)²): Kott (2001),
    Journal of Official Statistics 17. R groups change the estimate, others have no say in it. NaN with under two.
    """
    apart = np.asarray(without, dtype=float) - np.asarray(estimate)
    if len(apart) < 2:
        return np.full(np.shape(estimate), np.nan)
    share = 1 / np.maximum(np.count_nonzero(apart, axis=0), 2)
    return np.sqrt((1 - share) * (apart**2).sum(axis=0))


def band(number: NDArray) -> NDArray:
    """Return the band of each whole number (a position, a count): the number itself below 8, then floor(√(8·number)).

    Bands widen with the square root of the number.
    """
    return np.where(number < EACH, number, np.floor(np.sqrt(EACH * number.astype(float)))).astype(np.int32)


def distinct(numbers: ArrayLike) -> tuple[NDArray, NDArray]:
    """Return the different values of whole numbers from 0 up, in ascending order, and each number's index among them.

    Does what np.unique does with return_inverse, but without sorting where the numbers are small.
    """
    numbers = np.asarray(numbers)
    if numbers.max(initial=0) > SMALL:
        return np.unique(numbers, return_inverse=True)
    occurs = np.bincount(numbers) > 0
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[numbers]


def quantiles(values: NDArray, counts: NDArray, shares: ArrayLike) -> NDArray:
    """Return exact quantiles of a histogram: for each share, the least value that at least that share does not exceed.

    values [n]: in ascending order; counts [n]: how often each occurs; shares: from 0 to 1.
    """
    up_to = np.cumsum(counts)
    needed = np.ceil(np.asarray(shares) * up_to[-1] - 1e-9)
    return values[np.searchsorted(up_to, np.maximum(needed, 1))]


def grouped_median(values: NDArray, group: NDArray) -> NDArray:
    """Return the median of each group's values, NaN left out; NaN for a group that has no other value, or none at all.

    values [n]: in any order; group [n]: the group of each value, a whole number from 0.
    """
    order = np.lexsort((values, group))  # NaN last within its group
    starts = np.cumsum(np.bincount(group)) - np.bincount(group)
    number = np.bincount(group, ~np.isnan(values)).astype(int)
    low, high = starts + np.maximum(number - 1, 0) // 2, starts + number // 2
    return np.where(number > 0, (values[order[low]] + values[order[high]]) / 2, np.nan)


def mid_ranks(values: NDArray) -> NDArray:
    """Return the rank of each value, from 1; equal values share their mean rank."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[index]


def rank_share(count: NDArray, values: ArrayLike) -> float:
    """Return the share of the variance of ranks that lies between classes: 1 where each class is one value.

    count [class]: of values, in ascending order; values [class]: how many different values each may hold alike.
    """
    count, values = np.asarray(count, dtype=float), np.maximum(values, 1.0)  # a class that holds none has none
    middle = np.cumsum(count) - count / 2 - count.sum() / 2
    between, within = (count * middle**2).sum(), (count**3 * (1 - 1 / values**2)).sum() / 12
    return float(between / (between + within)) if between > 0 else 1.0


def grouped_spearman(a: NDArray, b: NDArray, group: NDArray, count: NDArray) -> tuple[float, NDArray]:
    """Return Spearman's rank correlation of a and b, ties at their mid-rank, and the same without each group [group].

    a, b, group [n]: whole numbers from 0; count [n]: how often class a meets class b in that group. NaN where a or b
    has one class only. The sums and products without a group are those of all groups less its own, so no table has to
    be built for each group that is left out.
    """
    classes_a, classes_b, groups = (int(each.max()) + 1 for each in (a, b, group))
    groups += 1  # the last one leaves nothing out
    count, in_a, in_b = count.astype(float), a * groups + group, b * groups + group
    both = np.bincount(a * classes_b + b, count, classes_a * classes_b).reshape(classes_a, classes_b)
    left_a, rank_a = _left(in_a, count, classes_a, groups)
    left_b, rank_b = _left(in_b, count, classes_b, groups)
    inside = np.bincount(group, count * rank_a.take(in_a) * rank_b.take(in_b), groups)
    joint = (rank_a * (both @ rank_b)).sum(axis=0) - inside
    spread = (left_a * rank_a**2).sum(axis=0) * (left_b * rank_b**2).sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        correlation = np.where(spread > 0, joint / np.sqrt(spread), np.nan)
    return float(correlation[-1]), correlation[:-1]


def _left(cell: NDArray, count: NDArray, classes: int, groups: int) -> tuple[NDArray, NDArray]:
    """Return how many of each class remain without each group, and their mid-ranks less the mean rank [class, group].

    cell [n]: class · groups + group of each count; count [n]; classes, groups: how many there are.
    """
    inside = np.bincount(cell, count, classes * groups).reshape(classes, groups)
    left = inside.sum(axis=1, keepdims=True) - inside
    return left, np.cumsum(left, axis=0) - left / 2 - left.sum(axis=0) / 2


def fisher_interval(r: ArrayLike, error: ArrayLike, degrees: ArrayLike) -> tuple[NDArray, NDArray]:
    """Return the ends of the 95 % interval of a correlation r; error, degrees: standard error of atanh(r) and its
    degrees of freedom."""
    with np.errstate(divide="ignore", invalid="ignore"):
        middle, half = np.arctanh(r), t_half(degrees) * np.asarray(error)
    return np.tanh(middle - half), np.tanh(middle + half)


def shrink(mean: NDArray, error: NDArray) -> tuple[NDArray, NDArray]:
    """Shrink means towards their common mean by empirical Bayes: the larger a mean's standard error, the more.

    mean, error [n]: means y_i and their standard errors s_i. The model is y_i ~ N(θ_i, s_i²), θ_i ~ N(μ, τ²): τ² is the
    root of Σ (y_i - μ)² / (s_i² + τ²) = n - 1, or 0 without a root (Paule and Mandel, 1982); μ is the mean weighted by
    1 / (s_i² + τ²). Returns E θ_i and its posterior sd (Efron and Morris, 1975). The error of μ and τ² is not counted:
    with many means it is small.
    """
    variance = error**2
    if not np.ptp(mean):  # no difference to shrink, and with errors of 0 no weights
        return mean.copy(), np.zeros_like(variance)

    def pooled(between: float) -> tuple[float, float]:
        weight = 1 / (variance + between)
        centre = float((weight * mean).sum() / weight.sum())
        return centre, float((weight * (mean - centre) ** 2).sum()) - (len(mean) - 1)

    low, high = 0.0, 0.0 if pooled(0.0)[1] <= 0 else float(np.ptp(mean) ** 2) + 1e-12
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if pooled(middle)[1] > 0 else (low, middle)
    centre, _ = pooled(high)
    weight = high / (high + variance)
    return centre + weight * (mean - centre), np.sqrt(weight * variance)


def student_p(r: float, n: int) -> float:
    """Return the two-sided p-value of a Pearson correlation r of n pairs: Student's t with n - 2 degrees of freedom."""
    if abs(r) >= 1:
        return 0.0
    return float(2 * stdtr(n - 2, -abs(r) * np.sqrt((n - 2) / (1 - r * r))))


def permutation_p(x: NDArray, y: NDArray) -> float:
    """Return the exact two-sided p-value of the Pearson correlation of x and y [n]: the share of all n! pairings whose
    correlation is as far from 0 as theirs, or farther.

    Meant for n up to 11, where it takes about a second. The last seven elements are permuted in one array, the others
    one by one.
    """
    a, b = x - x.mean(), y - y.mean()
    n = len(a)
    inner = min(n, 7)
    orders = np.array(list(permutations(range(inner))))
    reach = abs(a @ b) * (1 - 1e-12)
    hits = total = 0
    for outer in permutations(range(n), n - inner):
        remaining = b[[i for i in range(n) if i not in outer]]
        sums = a[: n - inner] @ b[list(outer)] + remaining[orders] @ a[n - inner :]
        hits += int((np.abs(sums) >= reach).sum())
        total += len(orders)
    return hits / total
