"""Compute statistics of clusters of rows by their definitions, to compare those of the analysis with."""

from __future__ import annotations

import numpy as np
import pandas as pd


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


def guarded(errors: dict[str, float], sizes: dict[str, int], clusters: dict[str, float], prior: float) -> pd.Series:
    """Return errors of means, none below the pooled variance of one value, weighed with each one's own by its clusters.

    errors: from the clusters of each alone; sizes, clusters: values and effective clusters of each; by name
    """
    table = pd.DataFrame({"error": errors, "n": sizes, "degrees": clusters}, dtype=float)
    table["degrees"] -= 1
    told = table[table["degrees"] > 0]
    pooled = np.average(told["error"] ** 2 * told["n"], weights=told["degrees"])
    drawn = (told["error"] ** 2 * told["n"] * told["degrees"] + pooled * prior) / (told["degrees"] + prior) / told["n"]
    return np.sqrt(np.maximum(told["error"] ** 2, drawn)).reindex(table.index)
