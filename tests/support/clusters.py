"""Compute statistics of clusters of rows by their definitions, to compare those of the analysis with."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import optimize

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
