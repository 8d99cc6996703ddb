"""Surprisal: does the model fire more neurons where it cannot tell what comes next, or on what it did not expect?

    surprisal(run)               mean nnz by band of the next token's loss; of="own": of the token's own loss
    surprisal_correlation(run)   Spearman's rank correlation of the two by layer, or by class of token and layer
    surprisal_within(run)        the same within tokens: of one token in different contexts

Unflagged tokens that have a loss are counted. Intervals leave out one group of documents at a time (delete-a-group
jackknife): one twentieth of them, or one tenth by the token's own loss or by class, which come from coarser counts. In
long runs, correlations and classes count whole documents with half a million tokens or more in all
(`rank_tables.class_step`). Cost: 30 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.statistics import distinct, effective, jackknife_error, t_half
from twell.analysis.summaries.derived import (
    ALL,
    CLASSED,
    CORRELATED,
    RANKS,
    correlated,
    correlation_interval,
    rows_of_classes,
)
from twell.analysis.summaries.rank_tables import BINS_A_COARSE_CLASS, LOSS_SCALE
from twell.analysis.summaries.read import Summaries, open_summaries
from twell.analysis.summaries.token_class import CLASSES
from twell.analysis.summaries.z_scores import PRODUCTS
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run

COARSE_SCALE = LOSS_SCALE // BINS_A_COARSE_CLASS  # band k of a scale is from (k/scale)² to ((k+1)/scale)² nats

SUMS = ("tokens", "nnz_sum")

Of = Literal["next", "own"]


def surprisal(run: Run, bins: int = 20, of: Of = "next", token_class: str | None = None) -> pd.DataFrame:
    """Return mean nnz by bin of loss. Columns: layer; bin; loss_low, loss_high (nats); tokens; nnz_mean; nnz_se, low,
    high (95 %, by groups of documents).

    of: whether tokens are binned by the loss of the next token, or ("own") by that of the token itself, as predicted
    one position earlier. token_class: counts the tokens of one class alone (see token_classes). bins: how many bins
    there are at most, the same in every layer. They hold numbers of tokens as equal as the bands of the summary allow
    (about 90 bands up to 14 nats; 11 for the token's own loss and within a class); a bin that no band falls into is
    left out.

    UserError for under 1 bin; Missing where the run has no losses.
    """
    if bins < 1:
        raise UserError(f"Expected at least 1 bin, got {bins}.")
    summaries = open_summaries(run)
    if of == "next" and token_class is None:
        rows, scale = summaries.columns("surprisal", "layer", "replicate", "loss_bin", *SUMS), LOSS_SCALE
    else:
        rows, scale = _classes(summaries, of, token_class, SUMS), COARSE_SCALE
        rows["loss_bin"] = rows["loss_class"]
    first_layer = rows["layer"] == 0
    per_band = np.bincount(rows["loss_bin"][first_layer], rows["tokens"][first_layer])
    bands = np.flatnonzero(per_band)
    per_band = per_band[bands]
    middle = (per_band.cumsum() - per_band / 2) / per_band.sum()
    chosen = np.minimum((middle * bins).astype(int), bins - 1)
    number = np.cumsum(np.diff(chosen, prepend=chosen[:1]) > 0)  # the bin of each band
    shape = (run.layers, int(number[-1]) + 1, int(rows["replicate"].max()) + 1)
    cell = np.searchsorted(bands, rows["loss_bin"])
    cell = (rows["layer"] * shape[1] + number[cell]) * shape[2] + rows["replicate"]
    tokens, nnz = (np.bincount(cell, rows[name], np.prod(shape)).reshape(shape) for name in SUMS)
    used = np.flatnonzero(tokens[0].sum(axis=0))  # replicates that have any token
    n, y = tokens.sum(axis=2), nnz.sum(axis=2)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = y / n
        without = (y[..., None] - nnz) / (n[..., None] - tokens)
    error = jackknife_error(mean, np.moveaxis(without[..., used], -1, 0))
    size = tokens[0][:, used]  # of all layers alike
    half = t_half(effective(size.sum(axis=1), (size**2).sum(axis=1)) - 1) * error
    layer, index = np.indices(mean.shape)
    first = np.searchsorted(number, np.arange(shape[1]))
    low, high = (bands[first] / scale) ** 2, ((bands[np.append(first[1:], len(bands)) - 1] + 1) / scale) ** 2
    frame = pd.DataFrame(
        {
            "layer": layer.ravel(),
            "bin": index.ravel(),
            "loss_low": low[index.ravel()],
            "loss_high": high[index.ravel()],
            "tokens": n.ravel().astype(np.int64),
            "nnz_mean": mean.ravel(),
            "nnz_se": error.ravel(),
            "low": (mean - half).ravel(),
            "high": (mean + half).ravel(),
        }
    )
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": _note(len(used)), "tokens": int(n[0].sum())}
    return frame


def _classes(
    summaries: Summaries, of: Of, token_class: str | None = None, sums: Sequence[str] = ("tokens",)
) -> dict[str, NDArray]:
    """Return rows of the summary `surprisal_classes` by one of the two losses.

    of: which loss; token_class: the class whose rows are returned, None for all; sums: the columns beside the keys. The
    column class holds indices into CLASSES. Raises Missing where there is no row.
    """
    kinds = CLASSES.to_pylist()
    if token_class is not None and token_class not in kinds:
        raise UserError(f"Expected a class of {', '.join(kinds)}, got {token_class!r}.")
    table = summaries.arrow("surprisal_classes", ("own", *CLASSED, *sums))
    rows = rows_of_classes(table, of == "own", None if token_class is None else kinds.index(token_class), sums)
    if not len(rows["class"]):
        raise Missing(f"{summaries.run.name} holds no {token_class or 'token'} that has a loss.")
    return rows


def surprisal_correlation(run: Run, of: Of = "next", by_class: bool = False) -> pd.DataFrame:
    """Return Spearman's rank correlation of nnz and loss by layer. Columns: class (with `by_class`); layer; spearman;
    low, high (95 %); n (tokens).

    of: whether the loss is that of the next token, or ("own") of the token itself. Correlations come from tables of
    classes of loss by classes of nnz, ties at mid-rank, over the share of it that such classes keep (attrs["note"] says
    where a copy of before revision 7 cannot be corrected so): they are within 0.003 of the correlation of the exact
    values, or, by the token's own loss or by class, within 0.01 over 10 000 tokens (0.04 over 200, or where a fifth of
    the text repeats one word, whose losses are nearly 0 and share a class). The interval is a bootstrap's of t over
    groups of documents (`derived.correlation_interval`). Empty where all counts, or all losses, are the same.
    """
    summaries, earlier = open_summaries(run), ""
    rows = _stored(summaries, of, by_class)
    if rows is None or np.isnan(rows["kept"]).any():  # a copy of an earlier revision
        try:
            fine = of == "next" and not by_class
            ranks = summaries.columns("surprisal_ranks", *RANKS) if fine else _classes(summaries, of)
            rows = correlated(ranks, by_class, fine)
        except Missing:  # a run without losses, or a copy that leaves these out
            if rows is None:
                raise
            earlier = "; up to 3 % too near to 0, as in summaries of before revision 7"
    columns = {"class": rows["class"]} if by_class else {}
    columns |= {"layer": rows["layer"].astype(np.int64), **{name: rows[name] for name in ("spearman", "low", "high")}}
    frame = pd.DataFrame({**columns, "n": rows["tokens"]})
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": _note(int(rows["groups"][0])) + earlier}
    return frame


def _stored(summaries: Summaries, of: Of, by_class: bool) -> dict[str, NDArray] | None:
    """Return the correlations that are kept, as columns CORRELATED; None where a copy of an earlier revision keeps
    none. Raises Missing where no token has such a loss."""
    try:
        rows = summaries.columns("surprisal_correlations", "own", *CORRELATED)
    except Missing:
        return None
    selected = (rows["own"] == (of == "own")) & ((rows["class"] != ALL) == by_class)
    if not selected.any():
        raise Missing(f"{summaries.run.name} holds no token that has a loss of its own.")
    return {name: values[selected] for name, values in rows.items()}


def surprisal_own(run: Run) -> pd.DataFrame:
    """Return the rank correlation of nnz and the loss of the token itself, as predicted one position earlier. Columns:
    layer; spearman; low, high (95 %); n (tokens). See surprisal_correlation."""
    return surprisal_correlation(run, of="own")


def surprisal_classes(run: Run) -> pd.DataFrame:
    """Return the rank correlation of nnz and the loss of the next token within each class of tokens. Columns: class;
    layer; spearman; low, high (95 %); n (tokens). See surprisal_correlation."""
    return surprisal_correlation(run, by_class=True)


def surprisal_within(run: Run) -> pd.DataFrame:
    """Return how nnz goes with the loss of the next token within tokens, by layer. Columns: layer; pearson; low, high
    (95 %); n (tokens).

    Pearson's correlation of nnz and loss, each less the mean of its token over the run: what it says is of one token in
    different contexts, where surprisal_correlation mixes in that some tokens fire much and are followed by surprises.
    The interval is of this Pearson correlation, made from the groups of documents that surprisal_correlation leaves out
    too (attrs["degrees"]: of freedom); it takes the tokens' means as known. The mean of nnz is over every occurrence,
    those without a loss too: of sequences of 16 tokens, whose last has none, that makes correlations 1 % too near to 0,
    of 4 tokens 10 to 14 %.
    """
    summaries = open_summaries(run, scored=True)
    rows = summaries.columns("surprisal_within", "layer", "replicate", "tokens", *PRODUCTS)
    replicates, replicate = distinct(rows["replicate"])
    shape = (len(replicates), run.layers)
    index = replicate * run.layers + rows["layer"]
    tokens, product, nnz, loss = (
        np.bincount(index, rows[name], np.prod(shape)).reshape(shape) for name in ("tokens", *PRODUCTS)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate = product.sum(axis=0) / np.sqrt(nnz.sum(axis=0) * loss.sum(axis=0))
        left = [each.sum(axis=0) - each for each in (product, nnz, loss)]
        without = left[0] / np.sqrt(left[1] * left[2])
    size = tokens[:, 0]
    degrees = float(effective(size.sum(), (size**2).sum())) - 1
    low, high = correlation_interval(estimate, without, degrees)
    columns = {"layer": np.arange(run.layers), "pearson": estimate, "low": low, "high": high}
    frame = pd.DataFrame({**columns, "n": tokens.sum(axis=0).astype(np.int64)})
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": _note(len(replicates)), "degrees": degrees}
    return frame


def _note(groups: int) -> str:
    """Return a clause that says which tokens and how many groups of documents the numbers come from."""
    return f"over unflagged tokens that have a loss; intervals from {groups} groups of documents, each left out once"
