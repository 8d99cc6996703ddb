"""Pair the tokens of two runs over one text: how surely their z differs, document by document.

Both runs meet the same documents, and where one of them fires much so does the other: taken as independent, their
difference would seem far less sure than it is. What both have in common is in neither run's summaries, so the rows of
both are read. Cost: 0.5 s of a core for 1 M tokens of 28 layers, in each run.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.layers import layer_moments
from twell.analysis.statistics import effective, pooled_variance
from twell.analysis.summaries.derived import Scale
from twell.analysis.summaries.documents import Documents, read_documents
from twell.analysis.summaries.part_rows import pieces
from twell.analysis.summaries.read import open_summaries
from twell.analysis.tokens.by_token import PRIOR_DOCUMENTS
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run

MOST_TOKENS = 2**23  # of a run whose rows are read for a question: ten seconds
CLUSTER_BITS = 32


def can_be_paired(*runs: Run) -> bool:
    """Return whether the rows of runs over the same sequences are here, and few enough to be read."""
    return all(run.has("activity") and run.manifest.tokens <= MOST_TOKENS for run in runs)


def paired_errors(first: Run, run: Run) -> pd.DataFrame:
    """Return by token_id the standard error of the difference of its mean z between two runs over the same sequences,
    in sd, and its degrees of freedom (columns error, degrees); NaN for a token of one document.

    As z_se of by_token, of the difference: a document's residual is that of one run less that of the other, each less
    what the document adds to the run's mean z; variances are drawn towards those of tokens like it.
    """
    documents = read_documents(first)
    read = [_by_document(each, documents) for each in (first, run)]
    key = np.union1d(read[0][0], read[1][0])
    _, token = np.unique(key >> CLUSTER_BITS, return_inverse=True)
    _, cluster = np.unique(key & (2**CLUSTER_BITS - 1), return_inverse=True)
    residual, centre, means = np.zeros(len(key)), np.zeros(1 + cluster.max(initial=0)), []
    for sign, (keys, tokens, z) in zip((-1, 1), read, strict=True):
        n, y = np.zeros((2, len(key)))
        at = np.searchsorted(key, keys)
        n[at], y[at] = tokens, z
        total = np.bincount(token, n)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.bincount(token, y) / total
            residual += sign * (y - mean[token] * n) / total[token]
        centre += sign * np.bincount(cluster, y) / n.sum()
        means.append(mean)
    squares = (residual - centre[cluster]) ** 2 - centre[cluster] ** 2  # of the documents that a token is not in: later
    count, k = np.bincount(token, n), effective(np.bincount(token, n), np.bincount(token, n * n))
    with np.errstate(divide="ignore", invalid="ignore"):
        variance = k / (k - 1) * np.maximum(np.bincount(token, squares) + (centre**2).sum(), 0)
    told = np.isfinite(variance) & (k > 1)
    pooled, degrees = pooled_variance(np.where(told, variance, np.nan), count, k, np.mean(means, 0), PRIOR_DOCUMENTS)
    columns = {"error": np.where(told, np.sqrt(pooled), np.nan), "degrees": np.where(told, degrees, np.nan)}
    return pd.DataFrame(columns, index=pd.Index(np.unique(key >> CLUSTER_BITS), name="token_id"))


def _by_document(run: Run, documents: Documents) -> tuple[NDArray, NDArray, NDArray]:
    """Return the keys of unflagged tokens and documents that meet, ascending, with their occurrences and sums of z.

    A key is the token, shifted by CLUSTER_BITS, and the number of the document.
    """
    moments = layer_moments(open_summaries(run, scored=True))
    scale = Scale.of(moments, moments)
    parts = []
    for path in run.parts("activity"):
        for rows in pieces(path, nnz_columns(run.layers), documents):
            z = np.empty(len(rows))
            for block, counts in rows.blocks(float):
                z[block] = counts @ scale.weight - scale.level
            plain = rows.flags == 0
            key = rows.token[plain].astype(np.int64) << CLUSTER_BITS | rows.cluster[plain]
            parts.append(_added(key, np.ones(len(key)), z[plain]))
    return _added(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _added(key: NDArray, tokens: NDArray, z: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Return different keys, ascending, with the sums of what stands beside them."""
    keys, index = np.unique(key, return_inverse=True)
    return keys, np.bincount(index, tokens, len(keys)), np.bincount(index, z, len(keys))
