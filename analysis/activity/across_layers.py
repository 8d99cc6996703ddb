"""Across layers: does a token that fires much in one layer fire much in the next?

    across_layers(run)   a row a pair of layers: the correlation of their nnz over tokens

Where the next layer's nnz follows from this one's, a schedule can be made ahead of it; where it does not, each layer's
load is news. Ranks of nnz, so that a few full tokens do not decide. From the rows of single tokens, read once. Cost:
0.45 s of processor time a million tokens of 28 layers, half of it for reading.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.analysis.activity.layers import counted
from twell.analysis.statistics import effective
from twell.analysis.summaries.derived import correlation_interval
from twell.analysis.summaries.documents import REPLICATES, read_documents
from twell.analysis.summaries.read import open_summaries
from twell.workbench.errors import Missing
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run


def across_layers(run: Run) -> pd.DataFrame:
    """Return Spearman's correlation of nnz between layers, over unflagged tokens. Columns: layer, other (a later
    layer); apart (layers between them, 1: the next); spearman; low, high (95 %, by documents); tokens.

    Missing where the run has one layer, or no rows of single tokens.
    """
    if run.layers < 2:
        raise Missing(f"{run.name} has one layer: there is none to compare it with.")
    ranks, documents, names = _ranks(run), read_documents(run), nnz_columns(run.layers)
    products = np.zeros((REPLICATES, run.layers + 1, run.layers + 1))
    for piece in run.pieces("activity", ["sequence", "position", "flags", *names]):
        used = np.flatnonzero(piece["flags"].to_numpy() == 0)
        sequence, position = (piece[name].to_numpy()[used] for name in ("sequence", "position"))
        group = documents.of_rows(sequence, position)["unit"] % REPLICATES
        counts, ends = [piece[name].to_numpy() for name in names], np.cumsum(np.bincount(group, minlength=REPLICATES))
        for replicate, chosen in enumerate(np.split(used[np.argsort(group, kind="stable")], ends[:-1])):
            rows = np.ones((run.layers + 1, len(chosen)))
            for index, nnz in enumerate(counts):
                rows[index] = ranks[index][nnz[chosen]]
            products[replicate] += rows @ rows.T
    size = products[:, -1, -1]
    kept = products[size > 0]
    whole, without = _correlation(kept.sum(axis=0)), np.array([_correlation(kept.sum(axis=0) - each) for each in kept])
    layer, other = np.triu_indices(run.layers, 1)
    spearman, degrees = whole[layer, other], float(effective(size.sum(), (size**2).sum())) - 1
    low, high = correlation_interval(spearman, without[:, layer, other], degrees)
    columns = {"layer": layer, "other": other, "apart": other - layer, "spearman": spearman, "low": low, "high": high}
    frame = pd.DataFrame({**columns, "tokens": int(size.sum())})
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": "over unflagged tokens; 95 % by documents"}
    return frame


def _ranks(run: Run) -> list[np.ndarray]:
    """Return, by layer, the mid-rank of each count among the run's unflagged tokens, from -1/2 to 1/2."""
    rows = counted(open_summaries(run))
    result = []
    for layer in range(run.layers):
        use = rows["layer"] == layer
        nnz, tokens = rows["nnz"][use], rows["tokens"][use]
        rank = np.zeros(1 + int(nnz.max()))
        rank[nnz] = (np.cumsum(tokens) - tokens / 2) / tokens.sum() - 0.5
        result.append(rank)
    return result


def _correlation(products: np.ndarray) -> np.ndarray:
    """Return correlations [layer, layer] from Σ x xᵀ of tokens whose last entry is 1."""
    with np.errstate(divide="ignore", invalid="ignore"):  # NaN where no row is, or where a layer never varies
        n, mean = products[-1, -1], products[-1, :-1] / products[-1, -1]
        covariance = products[:-1, :-1] / n - np.outer(mean, mean)
        spread = np.sqrt(np.diag(covariance))
        correlation = covariance / np.outer(spread, spread)
    np.fill_diagonal(correlation, np.nan)  # with itself: nothing to tell
    return correlation
