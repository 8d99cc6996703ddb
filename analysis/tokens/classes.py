"""Classes: do function words, names, numbers, punctuation and URL parts fire more or less than the rest?

    token_classes(run)   a row a class

A token belongs to one class by its spelling (`summaries.token_class`). A class describes the vocabulary and not
grammar: a name is a capitalised word-initial piece, so words at the start of a sentence count as names too. The
clusters of an interval are the tokens of the vocabulary, so that it generalises to other tokens of the class; function
words and parts of URLs are lists, so theirs are documents. Cost: 30 ms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pyarrow.compute as pc
from numpy.typing import NDArray

from twell.analysis.memo import memoized
from twell.analysis.statistics import distinct, effective, jackknife_error, t_half, welch_degrees
from twell.analysis.summaries.documents import REPLICATES
from twell.analysis.summaries.read import Summaries, open_summaries
from twell.analysis.summaries.token_class import CLASSES, FUNCTION_WORD, URL_PART, class_number
from twell.analysis.tokens.by_token import token_totals, z_variances
from twell.analysis.tokens.token_text import token_text
from twell.workbench.errors import Missing
from twell.workbench.run.checks.uncounted import no_counted_token
from twell.workbench.run.columns import LOSS_UNITS_PER_NAT
from twell.workbench.run.store import Run

LEAST_UNITS = 8  # effective groups of documents of an interval; with 6, those of 95 % hold 60 to 84 %
LEAST_TOKENS = 10  # effective tokens of a class; with 8, intervals of 95 % hold 77 % (data/log/analysis.md)
CLOSED = (FUNCTION_WORD, URL_PART)  # classes that are lists: there are no other tokens to speak of
CLASS_SUMS = ("tokens", "z_sum", "nnz_sum", "loss_sum", "loss_tokens")
LAYER_SUMS = ("tokens", "nnz_sum", "nnz_square")
LEAST_SPREAD = 1e-12  # of the mean square: a variance below that is what is left of rounding
OFTEN = 20  # a token with fewer occurrences is left out of effects


@memoized
def token_classes(run: Run, flagged: bool = False) -> pd.DataFrame:
    """Return mean z by class of tokens, the loudest class first. Columns:

    class; tokens (of the vocabulary that are spelt so and occur); count (occurrences); share (of all occurrences); z,
    z_se, low, high (mean over occurrences, see by_token; 95 %, Student's t); clusters (what the error is taken over:
    tokens of the vocabulary, so that it speaks of other tokens of the class, or documents where the class is a closed
    list); effective (Kish's effective number of these, since most occurrences belong to few tokens: its degrees of
    freedom are one less, and under ten, of documents eight, there is no interval); others (mean z of all other
    classes); difference, difference_low, difference_high (z less that of others, 95 %, by documents); effect,
    effect_low, effect_high (Hedges' g over tokens of the vocabulary, class against the others, 95 %); mean (nnz a
    layer); loss_mean (nats, of predictions made there). In a copy of before revision 5, and with `flagged`, a part of a
    URL is one wherever it stands, and differences have the interval of z.

    Missing where no token is counted.
    """
    summaries = open_summaries(run, scored=True)
    rows = token_totals(summaries, flagged)
    if not len(rows["tokens"]):
        raise no_counted_token(run)
    kinds = _kinds(summaries, rows["token_id"])
    number, index = distinct(kinds)
    table = _rows(run, rows, [CLASSES[kind].as_py() for kind in number.tolist()], index)
    table = table if flagged else _in_context(summaries, table)
    frame = table.sort_values(["z", "class"], ascending=[False, True], ignore_index=True)
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": "classes by spelling, a part of a URL beside . / or : alone; intervals by tokens of the vocabulary, "
        f"and by {summaries.clustered_by} for function words, parts of URLs and differences"
        f"{_taken_as_known(summaries)}",
        "tokens": int(rows["tokens"].sum()),
    }
    return frame


def _taken_as_known(summaries: Summaries) -> str:
    """Return a clause where a copy of before revision 7 does not tell how the layers' means and sds vary."""
    try:
        summaries.file("class_layers")
    except Missing:
        return ", which take the layers' means and sds as known: a little too wide"
    return ""


def _in_context(summaries: Summaries, table: pd.DataFrame) -> pd.DataFrame:
    """Return token_classes with what the summary `class_scores` tells: occurrences in context, and errors by documents;
    the table as it is where a copy of an earlier revision has none."""
    try:
        rows = summaries.columns("class_scores", "class", "replicate", *CLASS_SUMS)
    except Missing:
        return table
    names, kind = np.unique(rows["class"].astype(str), return_inverse=True)
    shape = (len(names), REPLICATES)
    index = kind * REPLICATES + rows["replicate"]
    n, z, nnz, loss, known = (np.bincount(index, rows[name], np.prod(shape)).reshape(shape) for name in CLASS_SUMS)
    used = n.sum(axis=0) > 0
    n, z = n[:, used], z[:, used]

    own, others = _means(n.sum(axis=1), z.sum(axis=1))
    own_without, others_without = _without_groups(summaries, names, n, z)
    units = effective(n.sum(axis=1), (n**2).sum(axis=1))
    error = jackknife_error(own, own_without.T)
    apart = jackknife_error(own - others, (own_without - others_without).T)
    t = np.where(units >= LEAST_UNITS, t_half(units - 1), np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        in_context = pd.DataFrame(
            {
                "count": n.sum(axis=1).astype(np.int64),
                "share": n.sum(axis=1) / n.sum(),
                "z": own,
                "others": others,
                "difference": own - others,
                "difference_low": own - others - t * apart,
                "difference_high": own - others + t * apart,
                "mean": nnz.sum(axis=1) / n.sum(axis=1) / summaries.run.layers,
                "loss_mean": loss.sum(axis=1) / LOSS_UNITS_PER_NAT / known.sum(axis=1),
            },
            index=names,
        )
    table = table[table["class"].isin(names)].set_index("class")
    half = (table["high"] - table["z"]).to_numpy()
    table[list(in_context)] = in_context.loc[table.index]
    table["low"], table["high"] = table["z"] - half, table["z"] + half
    closed = {"z_se": error, "effective": units, "low": own - t * error, "high": own + t * error}
    here = [name for name in CLOSED if name in table.index]
    table.loc[here, list(closed)] = pd.DataFrame(closed, index=names).loc[here]
    table.loc[here, "clusters"] = "documents"
    return table.reset_index()


def _means(tokens: NDArray, sums: NDArray) -> tuple[NDArray, NDArray]:
    """Return the mean of each class, and of all other classes, from their sums [class, ...]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums / tokens, (sums.sum(axis=0) - sums) / (tokens.sum(axis=0) - tokens)


def _without_groups(summaries: Summaries, names: NDArray, n: NDArray, z: NDArray) -> tuple[NDArray, NDArray]:
    """Return z of each class, and of all others, without each group of documents [class, group].

    Means and sds of the layers are those without the group too: where documents that fire much are left out, a class
    falls and so does what it is measured by. A copy of before revision 7 does not tell these, and its z stays as it is.
    names: of the classes; n, z [class, group]: tokens and sums of z.
    """
    try:
        sums = group_sums(summaries, names)
    except Missing:
        return _means(n.sum(axis=1, keepdims=True) - n, z.sum(axis=1, keepdims=True) - z)
    return standardised(*(each.sum(axis=2, keepdims=True) - each for each in sums))


def group_sums(summaries: Summaries, names: NDArray) -> list[NDArray]:
    """Return tokens, nnz and squared nnz of classes by layer and group of documents [class, layer, group].

    names: of the classes, ascending. Raises Missing in a copy of before revision 7.
    """
    rows = summaries.columns("class_layers", "class", "layer", "replicate", *LAYER_SUMS)
    groups, group = distinct(rows["replicate"])
    shape = (len(names), summaries.run.layers, len(groups))
    index = np.ravel_multi_index((np.searchsorted(names, rows["class"].astype(str)), rows["layer"], group), shape)
    return [np.bincount(index, rows[name], np.prod(shape)).reshape(shape) for name in LAYER_SUMS]


def standardised(tokens: NDArray, nnz: NDArray, square: NDArray) -> tuple[NDArray, NDArray]:
    """Return z of each class, and of all others, by means and sds of the layers over all classes [class, ...].

    tokens, nnz, square [class, layer, ...]: how many, and the sums of their nnz and of its square.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, square = (each.sum(axis=0) / tokens.sum(axis=0) for each in (nnz, square))
        spread = square - mean**2 > LEAST_SPREAD * square
        weight = np.where(spread, 1 / np.sqrt(square - mean**2), 0.0) / np.maximum(spread.sum(axis=0), 1)
    own, others = (((each - mean) * weight).sum(axis=1) for each in _means(tokens, nnz))
    return own, others


def _kinds(summaries: Summaries, token_ids: NDArray) -> NDArray:
    """Return each token's class as an index into CLASSES: from the summary, or from the token's text where the summary
    is of an earlier revision and lacks it."""
    scores = summaries.arrow("token_scores", ["token_id", "class"])
    if "class" not in scores.schema.names:
        return np.array([class_number(text) for text in token_text(summaries.run, token_ids)])
    ids = scores["token_id"].to_numpy()
    kinds = np.empty(1 + ids.max(initial=0), np.int64)
    kinds[ids] = pc.index_in(scores["class"], CLASSES).to_numpy()
    return kinds[token_ids]


def _rows(run: Run, rows: Mapping[str, NDArray], names: Sequence[str], number: NDArray) -> pd.DataFrame:
    """Return the columns of token_classes, a row a class.

    rows: columns by token, as `token_totals` returns them; names: those of the classes; number [token]: the index of
    the token's class in `names`.
    """
    columns = ("tokens", "z_sum", "nnz_sum", "loss_sum", "loss_tokens")
    n, y, nnz, loss, predicted = (rows[column].astype(float) for column in columns)
    size = len(names)
    tokens = np.bincount(number, minlength=size)
    weights = (n, n * n, y, nnz, loss, predicted)
    count, n2, total, nnz, loss, predicted = (np.bincount(number, values, size) for values in weights)
    error, units = _leave_one_out(n, y, number, size), effective(count, n2)
    half = np.where(units >= LEAST_TOKENS, t_half(units - 1), np.nan) * error
    with np.errstate(divide="ignore", invalid="ignore"):
        z, others = total / count, (total.sum() - total) / (count.sum() - count)
        loss = loss / LOSS_UNITS_PER_NAT / predicted
    frequent = n >= OFTEN
    means, variance, number = (y / n)[frequent], z_variances(rows)[frequent], number[frequent]
    effects = [_effect(means, variance, number == index) for index in range(size)]
    effect, reach = np.array(effects).T
    return pd.DataFrame(
        {
            "class": names,
            "tokens": tokens,
            "count": count.astype(np.int64),
            "share": count / count.sum(),
            "z": z,
            "z_se": error,
            "clusters": "tokens",
            "effective": units,
            "low": z - half,
            "high": z + half,
            "others": others,
            "difference": z - others,
            "difference_low": z - others - half,
            "difference_high": z - others + half,
            "effect": effect,
            "effect_low": effect - reach,
            "effect_high": effect + reach,
            "mean": nnz / count / run.layers,
            "loss_mean": loss,
        }
    )


def _leave_one_out(n: NDArray, y: NDArray, number: NDArray, size: int) -> NDArray:
    """Return the standard error of each class's mean z by how it moves without each of its tokens (Wu, 1986).

    Most occurrences of a class may be of one token, which draws the mean to itself: its residual tells too little.
    n, y, number [token]: occurrences, sum of z, class; size: how many classes there are. NaN for one token.
    """
    count, total = (np.bincount(number, values, size) for values in (n, y))
    with np.errstate(divide="ignore", invalid="ignore"):
        moved = (y - n * (total / count)[number]) / np.where(count[number] > n, count[number] - n, np.nan)
        return np.sqrt(np.bincount(number, moved**2, size))


def _effect(means: NDArray, variance: NDArray, inside: NDArray) -> tuple[float, float]:
    """Return the standardised difference of a class's tokens from all others, and half of its 95 % interval.

    means, variance [token]: mean z and the variance of that mean; inside [token]: whether the token is in the class.
    NaN with fewer than two tokens on either side. It is Hedges' g (1981) of the tokens' mean z, after the pooled
    variance is corrected for unreliability (Hunter and Schmidt, 2004, chapter 3): the variance that a mean has from
    being taken over few occurrences is subtracted, since rare tokens would otherwise make all classes look alike. The
    interval is by Student's t with Welch's degrees of freedom, which are few where the class has few tokens.
    """
    a, b = means[inside], means[~inside]
    if min(len(a), len(b)) < 2:
        return np.nan, np.nan
    degrees = len(a) + len(b) - 2
    observed = ((len(a) - 1) * a.var(ddof=1) + (len(b) - 1) * b.var(ddof=1)) / degrees
    noise = variance.sum() / (degrees + 2)
    true = observed - noise
    if not true > 0:
        return np.nan, np.nan
    g = (a.mean() - b.mean()) / np.sqrt(true) * (1 - 3 / (4 * degrees - 1))
    errors = np.sqrt([a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)])
    error = np.sqrt((errors**2).sum() / true + (g * observed / true) ** 2 / (2 * (degrees + 2)))
    return float(g), float(t_half(welch_degrees(errors, [len(a) - 1, len(b) - 1])) * error)
