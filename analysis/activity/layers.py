"""Layers: how many neurons fire in each, how that spreads over tokens, and how many never do.

    by_layer(run)          a row a layer
    layer_histogram(run)   a row a layer and count, from which every quantile is exact

Cost: a few milliseconds, from the summaries `layers` and `neurons`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.memo import memo_scope, memoized
from twell.analysis.statistics import distinct, effective, jackknife_error, quantiles, t_half
from twell.analysis.summaries.derived import moments
from twell.analysis.summaries.read import Summaries, open_summaries
from twell.workbench.errors import Missing
from twell.workbench.run.checks.uncounted import is_nowhere_finite, no_counted_token
from twell.workbench.run.store import Run

QUANTILES = {"p10": 0.10, "p50": 0.50, "p90": 0.90, "p99": 0.99}
DEAD_BOUND = 3.0  # with no firing in N tokens, 3/N is the 95 % upper bound of a neuron's density (rule of three)


def layer_histogram(run: Run, flagged: bool = False) -> pd.DataFrame:
    """Return how many tokens have each count, by layer. Columns: layer, nnz, tokens (how many have that count). Flagged
    tokens are left out unless `flagged`."""
    rows = counted(open_summaries(run), flagged)
    layers = rows["layer"] >= 0
    frame = pd.DataFrame({name: values[layers] for name, values in rows.items()})
    frame.attrs = {"definition": run.manifest.nnz_definition, "note": counted_tokens(run, flagged)}
    return frame


def histogram(summaries: Summaries, flagged: bool = False) -> pd.DataFrame:
    """Return layer_histogram with the sum over all layers as layer -1. Raises Missing where no token is counted."""
    return pd.DataFrame(counted(summaries, flagged))


@memoized
def counted(summaries: Summaries, flagged: bool = False) -> dict[str, NDArray]:
    """Return the columns of `histogram` as arrays, by layer and nnz."""
    rows = _rows(summaries)
    used = slice(None) if flagged else ~rows["flagged"]
    layer, nnz, tokens = (rows[name][used] for name in ("layer", "nnz", "tokens"))
    if not len(layer) or (rows["flagged"].all() and is_nowhere_finite(summaries.run)):
        raise no_counted_token(summaries.run, takes_flagged=True)
    if flagged:  # a count may have two rows: one for flagged tokens, one for the others
        size = int(nnz.max()) + 1
        both, index = np.unique((layer + np.int64(1)) * size + nnz, return_inverse=True)
        tokens = np.bincount(index, tokens).astype(tokens.dtype)
        layer, nnz = (both // size - 1).astype(layer.dtype), (both % size).astype(nnz.dtype)
    return {"layer": layer, "nnz": nnz, "tokens": tokens}


def band_sums(summaries: Summaries) -> dict[str, NDArray]:
    """Return sums of tokens and nnz by layer (-1: the sum over layers), replicate and band of positions.

    Intervals are jackknifed from these.
    """
    return summaries.columns("position_bands", "layer", "replicate", "band", "tokens", "nnz_sum")


def _rows(summaries: Summaries) -> dict[str, NDArray]:
    return summaries.columns("layers", "layer", "flagged", "nnz", "tokens")


@memoized
def by_layer(run: Run, flagged: bool = False) -> pd.DataFrame:
    """Return the mean, spread and dead neurons of each layer; a row a layer. Columns, nnz in neurons a token:

    layer; tokens (those counted: attrs["counted"] says which); mean; sd (over tokens, divisor N); p10, p50, p90, p99
    (exact: the least count that at least so many tokens do not exceed); max; sparsity (1 - mean / d_ff); share (of the
    nnz of all layers); dead (neurons that did not fire in any unflagged token of the run); dead_share; dead_upper (95 %
    upper bound of a dead neuron's density: 3 / tokens, were its tokens independent); dead_sequences (95 % upper bound
    of the share of sequences in which a dead neuron fires at all, 3 / sequences, however its tokens go together);
    dead_documents (the same of documents, 3 / documents, however its sequences go together; each bound at most 1);
    dead_waking (how many of the dead would fire on more such text, by Chao's estimate from the neurons that fired once
    and twice: a lower bound, far too low where a rare neuron fires several times in one document); used (mean of the
    fired neurons whose product is not zero); low, high (95 % of the mean, jackknifed over twenty groups of documents).
    The dead columns are empty where the run keeps no neuron sums, `used` where the model has no ReLU on the up branch,
    the interval with flagged=True."""
    with memo_scope():
        return _by_layer(open_summaries(run), flagged)


def _by_layer(summaries: Summaries, flagged: bool) -> pd.DataFrame:
    """Return by_layer without the memo scope around it."""
    run, rows = summaries.run, counted(summaries, flagged)
    starts = np.flatnonzero(np.diff(rows["layer"], prepend=-2))
    layers = rows["layer"][starts].astype(np.int64)
    per_layer_columns = (np.split(rows[name], starts[1:]) for name in ("nnz", "tokens"))
    histograms = zip(layers, *per_layer_columns, strict=True)
    per_layer = [_moments_of(nnz, tokens) for layer, nnz, tokens in histograms if layer >= 0]
    layers = layers[layers >= 0]
    columns: dict[str, Any] = {"layer": layers}
    columns |= {name: np.array([row[name] for row in per_layer]) for name in per_layer[0]}
    mean, tokens = columns["mean"], columns["tokens"]
    columns["sparsity"] = 1 - mean / run.widths[layers]
    total = float((mean * tokens).sum())
    columns["share"] = mean * tokens / total if total else np.full(len(layers), np.nan)
    dead, note = _dead(summaries)
    columns |= {name: values[layers] for name, values in dead.items()}
    columns["used"] = _used(summaries, flagged)[layers]
    half = np.nan if flagged else _half_width(summaries)[layers + 1]
    columns["low"], columns["high"] = mean - half, mean + half
    frame = pd.DataFrame(columns)
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "tokens": int(tokens[0]),
        "counted": counted_tokens(run, flagged),
        "sequences": run.manifest.sequences,
        "note": note,
        "intervals": f"by groups of {summaries.clustered_by}",
    }
    return frame


def _dead(summaries: Summaries) -> tuple[dict[str, Any], str]:
    """Return the columns of by_layer on neurons that never fired, of every layer, and what they were counted over."""
    run, tokens, sequences = summaries.run, unflagged_tokens(summaries), max(summaries.run.manifest.sequences, 1)
    empty = np.full(run.layers, np.nan)
    try:
        rows = summaries.columns("neurons", "layer", "fires")
    except Missing as reason:
        names = ("dead_share", "dead_upper", "dead_sequences", "dead_documents", "dead_waking")
        return {"dead": pd.array([None] * run.layers, dtype="Int64"), **dict.fromkeys(names, empty)}, str(reason)
    dead = run.widths - np.bincount(rows["layer"], minlength=run.layers)
    once, twice = (np.bincount(rows["layer"][rows["fires"] == n], minlength=run.layers) for n in (1, 2))
    of_tokens, of_sequences, of_documents = (dead_bound(n) for n in (tokens, sequences, summaries.clusters))
    columns = {
        "dead": pd.array(dead, dtype="Int64"),
        "dead_share": dead / run.widths,
        "dead_upper": np.full(run.layers, of_tokens),
        "dead_sequences": np.full(run.layers, of_sequences),
        "dead_documents": np.full(run.layers, of_documents),
        "dead_waking": np.minimum(once * (once - 1) / (2 * (twice + 1)), dead),
    }
    if not tokens:
        return columns, "dead: no token is unflagged, so that none counts as firing"
    waking = _waking(round(columns["dead_waking"].sum()), int(dead.sum()))
    return columns, (
        f"dead: no firing on {of_unflagged(tokens, sequences)}, so such a neuron fires, with 95 % confidence, in less "
        f"than {100 * of_sequences:.3g} % of sequences, were they independent, and on less than "
        f"{100 * of_tokens:.3g} % of tokens, were these independent; {waking}"
    )


def of_unflagged(tokens: int, sequences: int) -> str:
    """Return what counts are of: 3 unflagged tokens of 1 sequence."""
    return f"{tokens:,} unflagged token{'s' * (tokens != 1)} of {sequences:,} sequence{'s' * (sequences != 1)}"


def dead_bound(n: int) -> float:
    """Return the 95 % upper bound of the share of tokens, sequences or documents in which a neuron fires that fired in
    none of `n`: at most 1; NaN of none."""
    return min(1.0, DEAD_BOUND / n) if n else np.nan


def _waking(waking: int, dead: int) -> str:
    """Return what Chao's estimate, a least number, says of neurons that more text would wake."""
    if waking == 0:
        return (
            f"how often neurons fired does not tell whether more such text would wake any of the {dead:,} (Chao's "
            "estimate, a least number that bursts of firings make smaller, is 0): dead_curve shows if some still wake"
        )
    return (
        f"more such text would wake at least about {waking:,} of the {dead:,} (Chao's estimate, which bursts of "
        "firings make smaller)"
    )


def mean_over_layers(run: Run) -> tuple[float, float, float]:
    """Return mean nnz a layer, the mean over layers, and its 95 % interval."""
    summaries = open_summaries(run)
    rows = counted(summaries)
    total = rows["layer"] == -1
    mean = float((rows["nnz"][total] * rows["tokens"][total]).sum() / rows["tokens"][total].sum() / run.layers)
    half = float(_half_width(summaries)[0]) / run.layers
    return mean, mean - half, mean + half


def _moments_of(nnz: NDArray, tokens: NDArray) -> dict[str, Any]:
    """Return tokens, mean, sd, quantiles and maximum of one layer. nnz [n]: counts, ascending; tokens [n]: how many
    tokens have each."""
    n = tokens.sum()
    mean = (nnz * tokens).sum() / n
    sd = np.sqrt((tokens * (nnz - mean) ** 2).sum() / n)
    at_shares = dict(zip(QUANTILES, quantiles(nnz, tokens, list(QUANTILES.values())), strict=True))
    return {"tokens": n, "mean": mean, "sd": sd, **at_shares, "max": int(nnz[-1])}


def _half_width(summaries: Summaries) -> NDArray:
    """Return half of the 95 % interval of the mean of layer -1 and of each layer; NaN with fewer than two groups of
    documents, or where one holds nearly all tokens."""
    error, degrees = mean_errors(summaries)
    return t_half(degrees) * error


def mean_errors(summaries: Summaries) -> tuple[NDArray, NDArray]:
    """Return the standard error of mean nnz of layer -1 and of each layer, jackknifed over groups of documents, and its
    degrees of freedom."""
    run, rows = summaries.run, band_sums(summaries)
    groups, replicate = distinct(rows["replicate"])
    cell, shape = replicate * (run.layers + 1) + rows["layer"] + 1, (len(groups), run.layers + 1)
    n, y = (np.bincount(cell, rows[name], np.prod(shape)).reshape(shape) for name in ("tokens", "nnz_sum"))
    with np.errstate(divide="ignore", invalid="ignore"):
        estimate, without = y.sum(axis=0) / n.sum(axis=0), (y.sum(axis=0) - y) / (n.sum(axis=0) - n)
    size = n.sum(axis=1)
    return jackknife_error(estimate, without), effective(size.sum(), (size**2).sum()) - 1


def _used(summaries: Summaries, flagged: bool) -> NDArray:
    """Return the mean number of fired neurons whose product is not zero, by layer; NaN where the run did not count
    them."""
    try:
        rows = summaries.columns("used", "layer", "flagged", "used_sum", "tokens")
    except Missing:
        return np.full(summaries.run.layers, np.nan)
    selected = slice(None) if flagged else ~rows["flagged"]
    used, tokens = (
        np.bincount(rows["layer"][selected], rows[name][selected], summaries.run.layers)
        for name in ("used_sum", "tokens")
    )
    with np.errstate(invalid="ignore"):
        return used / tokens


def unflagged_tokens(summaries: Summaries) -> int:
    """Return how many tokens have no flag: those that statistics count by default."""
    return _tokens(summaries, flagged=False)


def counted_tokens(run: Run, flagged: bool = False) -> str:
    """Return which tokens a table counts, and how many it leaves out. flagged: whether it takes those with a flag"""
    return "every token of the run" if flagged else counted_in([run])


def counted_in(runs: Sequence[Run]) -> str:
    """Return which tokens statistics count, and how many of each run's they leave out."""
    tokens = [(run.name, flagged_tokens(each), unflagged_tokens(each)) for run in runs if (each := open_summaries(run))]
    left_out = ", ".join(f"{flagged:,} of {flagged + rest:,} in {name}" for name, flagged, rest in tokens)
    return f"counted tokens: all but special ones, the first of each sequence and non-finite ones ({left_out})"


def flagged_tokens(summaries: Summaries) -> int:
    """Return how many tokens have a flag: those that statistics leave out by default."""
    return _tokens(summaries, flagged=True)


def _tokens(summaries: Summaries, flagged: bool) -> int:
    """Return how many of the run's tokens are flagged, or are not."""
    rows = _rows(summaries)
    return int(rows["tokens"][(rows["layer"] == 0) & (rows["flagged"] == flagged)].sum())


def layer_moments(summaries: Summaries) -> tuple[NDArray, NDArray]:
    """Return mean and sd of nnz by layer over unflagged tokens."""
    return moments(_rows(summaries), summaries.run.layers)
