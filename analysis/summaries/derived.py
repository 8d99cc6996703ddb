"""Compute moments by layer and by band of positions, and rank correlations, from summaries alone.

Building uses these for its second reading (`z_scores`) and for the summary `surprisal_correlations`; the questions
about layers, positions and surprisal use them too. Cost: 5 ms for the moments, 30 ms for the correlations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri

from twell.analysis.statistics import (
    band,
    distinct,
    effective,
    grouped_spearman,
    rank_share,
    t_half,
)
from twell.analysis.summaries.rank_tables import COARSE_COUNT, coarse_band
from twell.analysis.summaries.token_class import CLASSES

POSITION_SUMS = ("tokens", "nnz_sum", "nnz_square")
RANKS = ("layer", "nnz_class", "loss_class", "replicate", "tokens")
CLASSED = ("class", "layer", "replicate", "loss_class", "nnz_class")
CORRELATED = ("class", "layer", "spearman", "low", "high", "tokens", "kept", "groups")
DRAWS, FEWEST_GROUPS = 1999, 8  # of groups of documents with replacement; groups from which they are drawn
TAIL = 0.0238  # of drawn t: as the draws are finite, with 0.025 they would hold normal values in 94.8 %
ALL = ""  # in place of a class: tokens of every class


def moments(rows: Mapping[str, ArrayLike], layers: int) -> tuple[NDArray, NDArray]:
    """Return mean and sd of nnz by layer over unflagged tokens, from columns of the summary `layers`.

    rows: columns layer, flagged, nnz, tokens; layers: how many the model has. NaN in a layer without tokens.
    """
    layer, flagged, nnz, tokens = (np.asarray(rows[name]) for name in ("layer", "flagged", "nnz", "tokens"))
    used = ~flagged & (layer >= 0)
    layer, nnz, tokens = layer[used], nnz[used], tokens[used]
    n = np.bincount(layer, tokens, minlength=layers)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.bincount(layer, tokens * nnz, minlength=layers) / n
        return mean, np.sqrt(np.bincount(layer, tokens * (nnz - mean[layer]) ** 2, minlength=layers) / n)


def band_moments(rows: Mapping[str, ArrayLike], mean: NDArray, sd: NDArray) -> tuple[NDArray, NDArray]:
    """Return mean and sd of nnz by band of positions and layer [band, layer], from columns of the summary `positions`.

    A band is a position below 8, then floor(√(8·position)). Unflagged tokens are counted; where a band has none, it
    gets `mean` and `sd` of its layer.
    """
    layers = len(mean)
    step = band(np.asarray(rows["position"]))
    layer = np.asarray(rows["layer"])
    used = ~np.asarray(rows["flagged"]) & (layer >= 0)
    cell = step[used] * layers + layer[used]
    shape = (int(step.max(initial=0)) + 1, layers)
    n, y, y2 = (
        np.bincount(cell, np.asarray(rows[name])[used].astype(float), shape[0] * layers).reshape(shape)
        for name in POSITION_SUMS
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        inside = y / n
        spread = np.sqrt(np.maximum(y2 / n - inside**2, 0))
    return np.where(n > 0, inside, mean), np.where(n > 0, spread, sd)


def rows_of_classes(
    table: pa.Table, own: bool, kind: int | None = None, sums: Sequence[str] = ("tokens",)
) -> dict[str, NDArray]:
    """Return the rows of a table like `surprisal_classes` by one of the two losses.

    own: whether by the loss of the token itself, else by that of the next; kind: keeps one class alone, as an index
    into CLASSES; sums: the columns to return beside the keys. The column class holds indices into CLASSES.
    """
    kinds = pc.index_in(table["class"], CLASSES).to_numpy()
    selected = table["own"].to_numpy() == own
    if kind is not None:
        selected &= kinds == kind
    return {name: table[name].to_numpy()[selected] for name in (*CLASSED[1:], *sums)} | {"class": kinds[selected]}


def correlations(ranks: pa.Table, classes: pa.Table) -> pa.Table:
    """Return the summary `surprisal_correlations`, from `surprisal_ranks` and `surprisal_classes`, both sorted by
    layer."""
    results = [(False, correlated({name: ranks[name].to_numpy() for name in RANKS}, by_class=False, fine=True))]
    for own in (False, True):
        rows = rows_of_classes(classes, own)
        if len(rows["class"]):
            results += [(own, correlated(rows, by_class)) for by_class in (False, True) if own or by_class]
    return pa.concat_tables(pa.table({"own": np.full(len(rows["layer"]), own), **rows}) for own, rows in results)


def correlated(rows: Mapping[str, NDArray], by_class: bool, fine: bool = False) -> dict[str, NDArray]:
    """Return the columns CORRELATED by name: over all tokens, or for each class of tokens.

    rows: columns RANKS and, if by_class, class (an index into CLASSES), sorted by layer; fine: whether the classes are
    those of `surprisal_ranks`.
    """
    highest = int(rows["nnz_class"].max(initial=0)) + 1
    values = count_classes(highest, fine)
    groups = np.count_nonzero(np.bincount(rows["replicate"]))
    if by_class:
        kinds = [(CLASSES[kind].as_py(), rows["class"] == kind) for kind in np.argsort(CLASSES.to_pylist()).tolist()]
    else:
        kinds = [(ALL, np.full(len(rows["tokens"]), True))]
    pieces = []
    for kind, in_class in kinds:
        if in_class.any():
            piece = _spearman({name: rows[name][in_class] for name in RANKS}, values)
            pieces.append({**piece, "class": np.full(len(piece["layer"]), kind, object)})
    columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in CORRELATED[:-1]}
    return {**columns, "groups": np.full(len(columns["layer"]), groups)}


def _spearman(rows: Mapping[str, NDArray], values: NDArray) -> dict[str, NDArray]:
    """Return rank correlations, their 95 % intervals and the tokens by layer, from columns RANKS sorted by layer.

    values [class of nnz]: how many counts each holds.
    """
    estimate, without, kept = rank_correlations(rows, values)
    low, high = correlation_interval(estimate, without, group_degrees(rows))
    n = np.bincount(rows["layer"], rows["tokens"]).astype(np.int64)
    return {"layer": np.arange(len(n)), "spearman": estimate, "low": low, "high": high, "tokens": n, "kept": kept}


def rank_correlations(rows: Mapping[str, NDArray], values: NDArray) -> tuple[NDArray, NDArray, NDArray]:
    """Return rank correlations by layer [layer], the same without each group of documents [group, layer], and `kept`.

    rows: columns RANKS sorted by layer; values: as in `count_classes`. Within a class ranks are not told apart, which
    makes a correlation of classes too small: as for grouped data, it is over `kept` [layer], the root of the shares of
    both ranks' variance that lie between classes.
    """
    _, group = distinct(rows["replicate"])
    starts = np.searchsorted(rows["layer"], np.arange(1, rows["layer"][-1] + 1))
    columns = (np.split(values, starts) for values in (rows["nnz_class"], rows["loss_class"], group, rows["tokens"]))
    layers = list(zip(*columns, strict=True))
    kept = np.array([_kept(nnz, loss, tokens, values) for nnz, loss, _, tokens in layers])
    results = [grouped_spearman(*layer) for layer in layers]
    estimate, without = (np.array(each) for each in zip(*results, strict=True))
    return np.clip(estimate / kept, -1, 1), np.clip(without / kept[:, None], -1, 1).T, kept


def group_degrees(rows: Mapping[str, NDArray]) -> float:
    """Return Kish's effective number of groups of documents less one; rows: columns RANKS of layers that have the same
    tokens each."""
    size = np.bincount(distinct(rows["replicate"])[1], rows["tokens"]).astype(float)
    return float(effective(size.sum(), (size**2).sum())) - 1


def count_classes(highest: int, fine: bool) -> NDArray:
    """Return how many counts each class of nnz holds, up to a class; fine: as in `correlated`."""
    counts = np.arange(1 + (max(highest, highest**2 // 8) if fine else (highest // COARSE_COUNT + 1) ** 4))
    return np.bincount(band(counts) if fine else coarse_band(counts))


def _kept(nnz: NDArray, loss: NDArray, tokens: NDArray, values: NDArray) -> float:
    """Return the share of a correlation of ranks that classes of nnz and of loss keep; the classes of `tokens` each."""
    n, each = np.bincount(nnz, tokens), np.bincount(loss, tokens)
    return float(np.sqrt(rank_share(n, values[: len(n)]) * rank_share(each, np.full(len(each), np.inf))))


def correlation_interval(estimate: NDArray, without: NDArray, degrees: float) -> tuple[NDArray, NDArray]:
    """Return the ends of the 95 % interval of correlations, from the same without each group of documents:
    `drawn_interval` on the scale of atanh. estimate [n]; without [group, n]; degrees: as there."""
    with np.errstate(divide="ignore", invalid="ignore"):
        low, high = drawn_interval(np.arctanh(estimate), np.arctanh(without), degrees)
    return np.tanh(low), np.tanh(high)


def drawn_interval(estimate: NDArray, without: NDArray, degrees: float) -> tuple[NDArray, NDArray]:
    """Return the ends of the 95 % interval of estimates, from the same without each group of documents.

    estimate [n]; without [group, n]; degrees: Kish's effective number of groups less one. Where a few documents make
    most of what an estimate is, a low one comes with a small error, and Student's interval holds it too seldom (88 % of
    95). So the ends come from a bootstrap of t over the jackknife's pseudo-values: Efron and Tibshirani (1993),
    sections 11.5 and 12.5. Drawn t have Student's tails already: without TAIL of them at either end, they hold the mean
    of normal values in 95 %, of 8 groups as of 20. They do not know that groups differ in size: on the scale of the
    normal distribution, that moves their quantiles out by the ratio of Student's of `degrees` to that of all groups
    less one. The ends are the same for the same numbers. Under FEWEST_GROUPS, Student's interval with the jackknife's
    error.
    """
    groups, half = len(without), t_half(degrees)
    error = np.sqrt((groups - 1) / groups * ((without - estimate) ** 2).sum(axis=0))  # of all groups, as the draws are
    if groups < FEWEST_GROUPS or np.isnan(half):
        return estimate - half * error, estimate + half * error
    tail = ndtr(ndtri(TAIL) * half / t_half(groups - 1))
    pseudo = without.mean(axis=0) - without  # less their mean, a (groups - 1)th of them, which t does not depend on
    draws = shares_drawn(groups)
    means, squares = draws @ pseudo, draws @ pseudo**2
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.sqrt(groups - 1) * means / np.sqrt(squares - means**2)
    # No group may change an estimate: 0/0. Draws of one group alone, without a variance, are too few to matter.
    # Where they are many, as of a text that repeats itself, t and an end are infinite.
    with np.errstate(over="ignore"):
        upper, lower = np.quantile(np.nan_to_num(t), [1 - tail, tail], axis=0)
        return estimate - upper * error, estimate - lower * error


@lru_cache(16)  # the draws take longer than what is made of them
def shares_drawn(groups: int) -> NDArray:
    """Return the share of each group in each draw of as many with replacement [draw, group], the same every time."""
    shares = np.random.default_rng(0).multinomial(groups, np.full(groups, 1 / groups), DRAWS) / groups
    shares.flags.writeable = False
    return shares


@dataclass(frozen=True)
class ZScale:
    """The weights of z: Σ weight·nnz - level is z of a token.

    weight [layer], level: from the whole run's moments; band_weight [band, layer], band_level [band]: from the moments
    at each band of positions.
    """

    weight: NDArray
    level: float
    band_weight: NDArray
    band_level: NDArray

    @classmethod
    def of(cls, run_moments: tuple[NDArray, NDArray], band_moments: tuple[NDArray, NDArray]) -> ZScale:
        """Make a scale from mean and sd of the run's unflagged tokens [layer], and those at each band [band, layer].

        z is the mean over layers of (nnz - mean) / sd; layers without spread are left out.
        """
        (weight, level), (band_weight, band_level) = _standard(*run_moments), _standard(*band_moments)
        return cls(weight, float(level), band_weight, band_level)


def _standard(mean: NDArray, sd: NDArray) -> tuple[NDArray, NDArray]:
    """Return weight [..., layer] and level [...], so that Σ weight·nnz - level is the mean over layers of
    (nnz - mean) / sd."""
    spread = sd > 0
    weight = np.where(spread, 1 / np.where(spread, sd, 1), 0) / np.maximum(spread.sum(axis=-1, keepdims=True), 1)
    return weight, (weight * np.where(spread, mean, 0)).sum(axis=-1)
