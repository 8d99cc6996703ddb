"""Surprisal: does the model fire more neurons where it cannot tell what comes next, or on what it did not expect?

    surprisal(run)               mean nnz by band of the next token's loss; of="own": of the token's own loss
    surprisal_correlation(run)   Spearman's rank correlation of the two by layer, or by class of token and layer

Over unflagged tokens that have a loss. Intervals leave out one group of sequences at a time (delete-a-group jackknife):
one twentieth, or one tenth where the token's own loss or its class is asked for, which come from coarser counts. Of
long runs, correlations and classes are those of half a million tokens or more, of whole sequences
(`summary.class_step`). Cost: 30 ms.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import pandas as pd

from twell.analysis import summary
from twell.analysis.classes import CLASSES
from twell.analysis.statistics import distinct, fisher_interval, jackknife_error, table_spearman
from twell.workbench.errors import Missing, UserError
from twell.workbench.store import Run

LOSS_SCALE, COARSE_SCALE = 24, 3  # band k is from (k/scale)² to ((k+1)/scale)² nats

Of = Literal["next", "own"]


def surprisal(run: Run, bins: int = 20, of: Of = "next", token_class: str | None = None) -> pd.DataFrame:
    """Columns: layer; bin; loss_low, loss_high (nats); tokens; nnz_mean; nnz_se.

    By the loss of the next token, or with of="own" by that of the token itself, as predicted one position earlier;
    `token_class` keeps the tokens of one class (see token_classes). `bins` bins of as equal a number of tokens as the
    bands of the summary allow (about 90 up to 14 nats; 11 of the token's own loss and within a class), the same in
    every layer; bins that no band falls into are left out.
    """
    if bins < 1:
        raise UserError(f"Expected at least 1 bin, got {bins}.")
    if of == "next" and token_class is None:
        rows, scale = summary.read(run, "surprisal"), LOSS_SCALE
    else:
        rows, scale = _classes(run, of, token_class).rename(columns={"loss_class": "loss_bin"}), COARSE_SCALE
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
    frame["loss_low"] = (low[frame["bin"]] / scale) ** 2
    frame["loss_high"] = ((high[frame["bin"]] + 1) / scale) ** 2
    frame["tokens"], frame["nnz_mean"], frame["nnz_se"] = n.ravel().astype("int64"), mean.ravel(), error.ravel()
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": _note(len(used)), "tokens": int(n[0].sum())}
    return frame


def _classes(run: Run, of: Of, token_class: str | None = None) -> pd.DataFrame:
    """The rows of `surprisal_classes` by one of the two losses, of one class or all."""
    rows = summary.read(run, "surprisal_classes", own=of == "own")
    if token_class is None:
        return rows
    if token_class not in CLASSES.to_pylist():
        raise UserError(f"Expected a class of {', '.join(CLASSES.to_pylist())}, got {token_class!r}.")
    rows = rows[rows["class"] == token_class]
    if rows.empty:
        raise Missing(f"{run.name} holds no {token_class} that has a loss.")
    return rows


def surprisal_correlation(run: Run, of: Of = "next", by_class: bool = False) -> pd.DataFrame:
    """Columns: class (with `by_class`); layer; spearman; low, high (95 %); n (tokens).

    Of nnz and the loss of the next token, or with of="own" of the token itself. From tables of classes of loss by
    classes of nnz, ties at mid-rank: within 0.003 of the correlation of the untied values, and where the token's own
    loss or its class is asked for within 0.01 over 10 000 tokens (0.04 over 200). The interval is a jackknife's on the
    atanh scale, Student's t with the number of groups less one. Empty where all counts, or all losses, are the same.
    """
    if of == "next" and not by_class:
        rows = summary.read(run, "surprisal_ranks")
        pieces = [_spearman(run, rows)]
    else:
        rows = _classes(run, of)
        groups = rows.groupby("class") if by_class else [("", rows)]
        pieces = [_spearman(run, group).assign(**{"class": name}) for name, group in groups]
    frame = pd.concat(pieces, ignore_index=True)
    frame = frame[[*(["class"] if by_class else []), "layer", "spearman", "low", "high", "n"]]
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": _note(rows["replicate"].nunique())}
    return frame


def surprisal_own(run: Run) -> pd.DataFrame:
    """nnz and the loss of the token itself, as predicted one position earlier. Columns: layer; spearman; low, high
    (95 %); n (tokens). See surprisal_correlation."""
    return surprisal_correlation(run, of="own")


def surprisal_classes(run: Run) -> pd.DataFrame:
    """nnz and the loss of the next token within each class of tokens. Columns: class; layer; spearman; low, high
    (95 %); n (tokens). See surprisal_correlation."""
    return surprisal_correlation(run, by_class=True)


def _spearman(run: Run, rows: pd.DataFrame) -> pd.DataFrame:
    replicates, replicate = distinct(rows["replicate"])
    layer, loss, nnz = (rows[name].to_numpy() for name in ("layer", "loss_class", "nnz_class"))
    shape = (run.layers, len(replicates), int(loss.max()) + 1, int(nnz.max()) + 1)
    cell = ((layer * shape[1] + replicate) * shape[2] + loss) * shape[3] + nnz
    counts = np.bincount(cell, rows["tokens"].to_numpy(), np.prod(shape)).reshape(shape)
    whole = counts.sum(axis=1)
    estimate = table_spearman(whole)
    without = table_spearman(whole[:, None] - counts)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = jackknife_error(np.arctanh(estimate), np.arctanh(without).T)
    low, high = fisher_interval(estimate, error, len(replicates) - 1)
    n = whole.sum(axis=(1, 2)).astype("int64")
    return pd.DataFrame({"layer": range(run.layers), "spearman": estimate, "low": low, "high": high, "n": n})


def _note(groups: int) -> str:
    return f"over unflagged tokens that have a loss; intervals from {groups} groups of sequences, each left out once"
