"""Several comparisons at once: what may be said of any of many layers or tokens, each of which has its own interval.

Of 28 intervals of 95 % that all hold "no difference", one or more leaves it out in up to half of all runs. So a verdict
that goes by any of several takes intervals that all hold together, and a list of what differs most has q-values.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

from twell.analysis.statistics import CONFIDENCE, t_half

FALSE_DISCOVERIES = 0.05  # of what is listed as different: the share that may differ by chance alone


def widened(degrees: ArrayLike, comparisons: int) -> NDArray:
    """Return by how many times to widen each of so many 95 % intervals that in 95 % of cases all of them hold, by
    Bonferroni's inequality; degrees: of freedom of an interval, NaN under one."""
    degrees = np.asarray(degrees, dtype=float)
    return stdtrit(np.maximum(degrees, 1), 1 - (1 - CONFIDENCE) / 2 / max(comparisons, 1)) / t_half(degrees)


def difference_p(difference: ArrayLike, error: ArrayLike, degrees: ArrayLike) -> NDArray:
    """Return the two-sided p-value of each difference by Student's t; NaN where it has no error, or under one degree of
    freedom."""
    difference, error, degrees = (np.asarray(each, dtype=float) for each in (difference, error, degrees))
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(difference == 0, 0.0, np.abs(difference) / error)
    return np.where((degrees >= 1) & ~np.isnan(error), 2 * stdtr(np.maximum(degrees, 1), -t), np.nan)


def q_values(p: ArrayLike) -> NDArray:
    """Return the q-value of each p-value: the least rate of false discoveries at which it is one. NaN are left out.

    Benjamini and Hochberg (1995), Journal of the Royal Statistical Society B 57; it holds for comparisons that go
    together too, as those of tokens in the same documents do (Benjamini and Yekutieli, 2001).
    """
    p = np.asarray(p, dtype=float)
    order = np.argsort(-p, kind="stable")
    order = order[~np.isnan(p[order])]
    number = len(order)
    result = np.full(len(p), np.nan)
    result[order] = np.minimum.accumulate(p[order] * number / np.arange(number, 0, -1))
    return result
