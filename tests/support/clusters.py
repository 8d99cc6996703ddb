"""Compute statistics of clusters of rows by their definitions, to compare those of the analysis with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from scipy import optimize, stats

FINE = {"xatol": 1e-9, "fatol": 1e-15, "maxiter": 20_000, "maxfev": 20_000}


def effective(clusters: pd.Series) -> float:
    """Return Kish's effective number of the clusters of each row."""
    return float(len(clusters) ** 2 / (clusters.value_counts() ** 2).sum())


def centred_error(values: pd.Series, documents: pd.Series, everyone: pd.Series, documents_of_all: pd.Series) -> float:
    """Return the standard error of a mean less that of everyone, by its definition: a residual a document, less what
    the document adds to the mean of everyone, squared, summed; NaN for one document."""
    if documents.nunique() < 2:
        return float("nan")
    residuals = (values - values.mean()).groupby(documents).sum() / len(values)
    of_all = everyone.groupby(documents_of_all).sum() / len(everyone)
    k = effective(documents)
    return float(np.sqrt(k / (k - 1) * (residuals.sub(of_all, fill_value=0) ** 2).sum()))


def pooled(table: pd.DataFrame, prior: float) -> pd.DataFrame:
    """Return the error of each mean and its degrees of freedom (error, degrees): its own variance, mixed with the one
    that means like it have, as `statistics.pooled_variance` describes it; fitted by a general optimizer.

    table: by name, error (from its own clusters alone, NaN for one), n (values), clusters (effective), mean
    """
    table = table.astype(float)
    own, degrees = (table["error"] ** 2 * table["n"]).fillna(0), table["clusters"] - 1
    size, told = np.log(table["n"] / table["clusters"]), table["clusters"] > 1
    level = table["mean"].clip(*table.loc[told, "mean"].quantile([0.01, 0.99]))

    def fitted(beta: np.ndarray) -> pd.Series:
        return np.exp(beta[0] + beta[1] * level + beta[2] * size)

    def unlike(beta: np.ndarray) -> float:  # no matter what a mean of one cluster has: it counts for nothing
        common = fitted(beta)
        return float((degrees * (own / common + np.log(common))).sum() / degrees.sum())

    start = [np.log(np.average(own, weights=degrees)), 0.0, 0.0]
    common = fitted(optimize.minimize(unlike, start, method="Nelder-Mead", options=FINE).x)
    variance = (own * degrees + common * prior) / (degrees + prior) / table["n"]
    return pd.DataFrame({"error": np.sqrt(variance), "degrees": degrees + prior})


def correlation_interval(
    groups: pd.Series, statistic: Callable[[pd.DataFrame], float], rows: pd.DataFrame
) -> tuple[float, float]:
    """Return the ends of a correlation's interval. statistic: atanh of the correlation of rows."""
    low, high = np.tanh(drawn_interval(groups, statistic, rows))
    return float(low), float(high)


def drawn_interval(
    groups: pd.Series, statistic: Callable[[pd.DataFrame], float], rows: pd.DataFrame
) -> tuple[float, float]:
    """Return the ends of an interval: t of what the jackknife's pseudo-values are in groups that are drawn anew, one
    draw after another; Student's for under eight groups. statistic: of rows."""
    whole, labels = statistic(rows), sorted(set(groups))
    without, r = np.array([statistic(rows[groups != label]) for label in labels]), len(labels)
    error, half = np.sqrt((r - 1) / r * np.sum((without - whole) ** 2)), stats.t.ppf(0.975, effective(groups) - 1)
    upper, lower = half, -half
    if r >= 8:
        pseudo, drawn = r * whole - (r - 1) * without, []
        for draw in np.random.default_rng(0).multinomial(r, np.full(r, 1 / r), 1999):
            values = np.repeat(pseudo, draw)
            drawn.append((values.mean() - pseudo.mean()) / (values.std(ddof=1) / np.sqrt(r)))
        tail = stats.norm.sf(stats.norm.isf(0.0238) * half / stats.t.ppf(0.975, r - 1))
        upper, lower = np.quantile(drawn, [1 - tail, tail])
    return float(whole - upper * error), float(whole - lower * error)


def kept(nnz: pd.Series, class_of: Callable[[float], float], loss: pd.Series) -> float:
    """The root of the shares of the variance of ranks that lie between classes, of nnz and of loss: a class of nnz
    holds whole numbers, one as often as another; a class of loss any number."""
    held = pd.Series([class_of(n) for n in range(3000)]).value_counts()
    shares = []
    for values, alike in ((nnz, held), (loss, None)):
        ranks, sizes = stats.rankdata(values), values.map(values.value_counts()).to_numpy(float)
        within = np.mean(sizes**2 * (1 if alike is None else 1 - 1 / values.map(alike).to_numpy(float) ** 2)) / 12
        shares.append(ranks.var() / (ranks.var() + within) if ranks.var() > 0 else 1.0)
    return float(np.sqrt(np.prod(shares)))


def jackknife(values: np.ndarray, groups: np.ndarray) -> float:
    """Return the standard error of a mean by its definition: without each group once."""
    kept = [values[groups != group].mean() for group in np.unique(groups)]
    r = len(kept)
    return float(np.sqrt((r - 1) / r * np.sum((np.array(kept) - values.mean()) ** 2)))
