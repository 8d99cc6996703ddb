"""Pair the tokens of two runs over one text: how surely their z differs, document by document.

Both runs meet the same documents, and where one of them fires much so does the other: taken as independent, their
difference would seem far less sure than it is. What both have in common is in neither run's summaries, so the rows of
both are read. Cost: 0.35 s of a core for 1 M tokens of 28 layers, in each run.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pandas as pd
from scipy.sparse import csr_array, diags_array

from twell.analysis.activity.layers import layer_moments
from twell.analysis.statistics import effective, pooled_variance
from twell.analysis.summaries.derived import ZScale
from twell.analysis.summaries.documents import Documents, read_documents
from twell.analysis.summaries.part_rows import READ
from twell.analysis.summaries.read import open_summaries
from twell.analysis.tokens.by_token import PRIOR_DOCUMENTS
from twell.workbench.run.part_files import open_part
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import Run

ROUNDING = 1e-12  # sd: the least error, so that nothing is told from what is left of rounding where runs are the same
MOST_TOKENS = 2**23  # of a run whose rows are read for a question: three seconds on two cores


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
    with ThreadPoolExecutor(2) as threads:
        read = list(threads.map(partial(_by_document, documents=documents), (first, run)))
    shape = tuple(np.max([n.shape for n, _ in read], axis=0))
    residual, centre, means = csr_array(shape), np.zeros(shape[1]), []
    for sign, (n, z) in zip((-1, 1), read, strict=True):
        n.resize(shape)
        z.resize(shape)
        total = np.asarray(n.sum(axis=1))
        weight = sign / np.maximum(total, 1)
        means.append(np.asarray(z.sum(axis=1)) / np.maximum(total, 1))
        residual = residual + diags_array(weight) @ z - diags_array(weight * means[-1]) @ n
        centre += sign * np.asarray(z.sum(axis=0)) / total.sum()
    token_id = np.flatnonzero(total)
    k = effective(total, np.asarray(n.multiply(n).sum(axis=1)))
    with np.errstate(divide="ignore", invalid="ignore"):
        # Σ (residual - centre)² over all documents, those without the token too
        square = np.asarray(residual.multiply(residual).sum(axis=1)) - 2 * (residual @ centre) + (centre**2).sum()
        variance = np.where(k > 1, k / (k - 1) * np.maximum(square, 0), np.nan)
    variance, total, k, mean = (each[token_id] for each in (variance, total, k, np.mean(means, axis=0)))
    pooled, degrees = pooled_variance(variance, total, k, mean, PRIOR_DOCUMENTS)
    told = k > 1
    error = np.maximum(np.sqrt(pooled), ROUNDING)
    errors = {"error": np.where(told, error, np.nan), "degrees": np.where(told, degrees, np.nan)}
    return pd.DataFrame(errors, index=pd.Index(token_id, name="token_id"))


def _by_document(run: Run, documents: Documents) -> tuple[csr_array, csr_array]:
    """Return how often unflagged tokens occur in each document, and the sums of their z there [token, document]."""
    moments, names = layer_moments(open_summaries(run, scored=True)), nnz_columns(run.layers)
    scale = ZScale.of(moments, moments)
    pieces = []
    for path in run.parts("activity"):
        for batch in open_part(path).iter_batches(READ, columns=["sequence", "token_id", "flags", *names]):
            sequence, token, flags, *counts = (column.to_numpy(zero_copy_only=False) for column in batch.columns)
            z = np.full(len(token), -scale.level)
            for nnz, weight in zip(counts, scale.weight.tolist(), strict=True):
                z += weight * nnz
            plain = flags == 0
            pieces.append((token[plain], documents.of_rows(sequence, sequence)["cluster"][plain], z[plain]))
    token, document, z = (np.concatenate(each) for each in zip(*pieces, strict=True))
    return csr_array((np.ones(len(z)), (token, document))), csr_array((z, (token, document)))
