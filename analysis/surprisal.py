"""Surprisal: does the model fire more neurons where it cannot tell what comes next?

    surprisal(run)               mean nnz by band of the next token's loss
    surprisal_correlation(run)   Spearman's rank correlation of the two, a row a layer

Over unflagged tokens that have a loss. Intervals leave out one twentieth of the sequences at a time (delete-a-group
jackknife). Cost: 30 ms, from the summaries `surprisal` and `surprisal_ranks`.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from twell.analysis import summary
from twell.analysis.statistics import fisher_interval, jackknife_error, table_spearman
from twell.workbench.errors import UserError
from twell.workbench.store import Run

LOSS_SCALE = 24  # band k is from (k/24)² to ((k+1)/24)² nats


def surprisal(run: Run, bins: int = 20) -> pd.DataFrame:
    """Columns: layer; bin; loss_low, loss_high (nats, of the next token); tokens; nnz_mean; nnz_se.

    `bins` bins of as equal a number of tokens as the bands of the summary allow (about 90 up to 14 nats), the same in
    every layer; bins that no band falls into are left out.
    """
    if bins < 1:
        raise UserError(f"Expected at least 1 bin, got {bins}.")
    rows = summary.read(run, "surprisal")
    per_band = rows[rows["layer"] == 0].groupby("loss_bin")["tokens"].sum()
    middle = (per_band.cumsum() - per_band / 2) / per_band.sum()
    chosen = np.minimum((middle * bins).astype(int), bins - 1)
    number = pd.Series(pd.factorize(chosen)[0], index=per_band.index)
    rows = rows.assign(bin=rows["loss_bin"].map(number))
    shape = (run.layers, int(number.max()) + 1, int(rows["replicate"].max()) + 1)
    place = (rows["layer"], rows["bin"], rows["replicate"])
    tokens, nnz = np.zeros(shape), np.zeros(shape)
    np.add.at(tokens, place, rows["tokens"])
    np.add.at(nnz, place, rows["nnz_sum"])
    used = np.flatnonzero(tokens[0].sum(axis=0))  # replicates that hold any token at all
    n, y = tokens.sum(axis=2), nnz.sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = y / n
        without = (y[..., None] - nnz) / (n[..., None] - tokens)
    error = jackknife_error(mean, np.moveaxis(without[..., used], -1, 0))
    layer, index = np.indices(mean.shape)
    bands = number.index.to_numpy()
    low, high = (pd.Series(bands).groupby(number.to_numpy()).agg(how).to_numpy() for how in ("min", "max"))
    frame = pd.DataFrame({"layer": layer.ravel(), "bin": index.ravel()})
    frame["loss_low"] = (low[frame["bin"]] / LOSS_SCALE) ** 2
    frame["loss_high"] = ((high[frame["bin"]] + 1) / LOSS_SCALE) ** 2
    frame["tokens"], frame["nnz_mean"], frame["nnz_se"] = n.ravel().astype("int64"), mean.ravel(), error.ravel()
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": _note(len(used)), "tokens": int(n[0].sum())}
    return frame


def surprisal_correlation(run: Run) -> pd.DataFrame:
    """Columns: layer; spearman; low, high (95 %); n (tokens).

    Of the next token's loss and nnz, from tables of 4 bands of loss together by classes of nnz (exact below 8, then
    √(8·nnz)), ties at mid-rank: within 0.003 of the correlation of the untied values. The interval is a jackknife's on
    the atanh scale, Student's t with the number of groups less one. Empty where a layer's counts are all the same.
    """
    rows = summary.read(run, "surprisal_ranks")
    replicates = np.unique(rows["replicate"])
    shape = (run.layers, len(replicates), int(rows["loss_class"].max()) + 1, int(rows["nnz_class"].max()) + 1)
    counts = np.zeros(shape)
    place = (rows["layer"], np.searchsorted(replicates, rows["replicate"]), rows["loss_class"], rows["nnz_class"])
    counts[place] = rows["tokens"]  # a class is one row
    whole = counts.sum(axis=1)
    estimate = table_spearman(whole)
    without = table_spearman(whole[:, None] - counts)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = jackknife_error(np.arctanh(estimate), np.arctanh(without).T)
    low, high = fisher_interval(estimate, error, len(replicates) - 1)
    n = whole.sum(axis=(1, 2)).astype("int64")
    frame = pd.DataFrame({"layer": range(run.layers), "spearman": estimate, "low": low, "high": high, "n": n})
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": _note(len(replicates))}
    return frame


def _note(groups: int) -> str:
    return f"over unflagged tokens that have a loss; intervals from {groups} groups of sequences, each left out once"
