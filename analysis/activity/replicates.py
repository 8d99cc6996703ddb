"""Totals of nnz by groups of documents (replicates), and how the means of two runs differ by them.

An interval leaves out one group at a time (`statistics.jackknife_error`). Its degrees of freedom are those of the
groups that have tokens in the place that it is of: late positions, say, may be reached by two long documents of fifty.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.analysis.statistics import CONFIDENCE, effective, jackknife_error, welch_degrees
from twell.analysis.summaries.read import open_summaries
from twell.workbench.run.store import Run

Means = tuple[np.ndarray, np.ndarray]  # [key], and without each replicate [key, replicate]
ROUNDING = 1e-9  # of a difference: an error up to that share of it is none


def replicate_totals(run: Run, keys: list[str]) -> pd.DataFrame:
    """Return sums of tokens and nnz by key, a column pair a replicate; 0 where a replicate has no token there."""
    rows = open_summaries(run).frame("position_bands")
    rows = rows[rows["layer"] >= 0]
    sums = rows.groupby([*keys, "replicate"])[["tokens", "nnz_sum"]].sum().unstack("replicate", fill_value=0)
    return sums.astype(float)


def effective_groups(sums: pd.DataFrame) -> np.ndarray:
    """Return the effective number of replicates that have tokens, [key]."""
    size = sums["tokens"].to_numpy()
    return effective(size.sum(axis=1), (size**2).sum(axis=1))


def mean_counts(sums: pd.DataFrame) -> Means:
    """Return mean nnz [key], and the means without each replicate [key, replicate]."""
    n, y = sums["tokens"].to_numpy(), sums["nnz_sum"].to_numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = y.sum(axis=1) / n.sum(axis=1)
        without = (y.sum(axis=1, keepdims=True) - y) / (n.sum(axis=1, keepdims=True) - n)
    return mean, np.where(np.isfinite(without), without, mean[:, None])


def same_replicates(a: pd.DataFrame, b: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the totals of two runs by the replicates of either: one of which a run has no counted token is 0 there."""
    both = a.columns.union(b.columns, sort=False)
    return a.reindex(columns=both, fill_value=0.0), b.reindex(columns=both, fill_value=0.0)


def apart(a: Means, b: Means, degrees: np.ndarray, paired: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return b less a, [key], its standard error and the degrees of freedom of that.

    a, b: means, and the means without each replicate, as `mean_counts` returns them, or their logarithms; degrees [2,
    key]: of freedom, of each run; paired: whether the replicates of both are the same documents

    Counts are whole numbers, and two or three groups may differ by exactly as much by chance: without an error, t would
    be beyond doubt. What is left is that all have one sign, which chance does once in 2^degrees cases. Where that is
    too often the error is NaN.
    """
    difference = b[0] - a[0]
    if paired:
        error, freedom = jackknife_error(difference, (b[1] - a[1]).T), degrees.min(axis=0)
    else:
        errors = np.stack([jackknife_error(mean, without.T) for mean, without in (a, b)])
        error, freedom = np.hypot(*errors), welch_degrees(errors, degrees)
    alike = (difference != 0) & (error <= ROUNDING * np.abs(difference))
    return difference, np.where(alike & (2.0**-freedom > 1 - CONFIDENCE), np.nan, error), freedom
