"""Clusters of rows, as the analysis counts them, the long way round."""

from __future__ import annotations

import pandas as pd


def effective(clusters: pd.Series) -> float:
    """Return Kish's effective number of the clusters of each row."""
    return float(len(clusters) ** 2 / (clusters.value_counts() ** 2).sum())
