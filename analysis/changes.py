"""What changed between two runs: their headline numbers side by side, those that changed most of the whole first.

    headline_changes([before, after])   a row a number: both values, difference and ratio, with 95 % intervals
    compare_means(before, after)        the same of mean nnz over all layers alone

Cost: that of `overview` for each run, and 20 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.activity.replicates import apart, effective_groups, mean_counts, replicate_totals, same_replicates
from twell.analysis.compare import of_one_text, same_sequences
from twell.analysis.overview import overview
from twell.analysis.statistics import t_half
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

# Of each speedup: its name in `overview`, and what the names of its interval's ends begin with there.
SPEEDS = {"ffn_speedup": ("speedup", "speedup"), "pass_speedup": ("pass_speedup", "pass")}
ALIKE = 1.1  # times the tokens, up to which two counts of dead neurons are compared
EVIDENCE = ("clear", "unknown", "chance")  # in the order in which rows come
COLUMNS = ("number", "value", "first", "difference", "low", "high", "ratio", "ratio_low", "ratio_high", "of_whole")


def headline_changes(runs: Sequence[Run]) -> pd.DataFrame:
    """Return how the second of two runs differs from the first. First comes what is clear, by how much of the whole it
    changes; then what has no interval, then what may be chance, last what cannot be compared. Columns:

    number (nnz_mean; firing_share, of a layer's neurons; dead_share; loss, in nats; ffn_speedup; pass_speedup); value,
    first (of the second and of the first run); difference, low, high; ratio, ratio_low, ratio_high (95 %; empty where
    the runs tell no interval); of_whole (the change as a share of the whole: of a layer's neurons, of all neurons, of
    the first run's loss, of the dense time that the FFN or the pass takes); evidence (clear: the interval of the
    difference leaves 0 out, or that of the ratio 1 where the difference has none; chance: it does not; unknown: there
    is none). What one of the runs lacks is left out; losses of different texts have no ratio, nor have dead neurons
    over unequal amounts of text, as more text finds more of them alive.
    """
    first, run = runs
    numbers = [overview(one) for one in (first, run)]
    rows = [*_of_nnz(first, run), *_counted(numbers, of_one_text(runs)), *_speeds(numbers)]
    frame = pd.DataFrame([dict.fromkeys(COLUMNS, np.nan) | row for row in rows], columns=list(COLUMNS))
    evidence = _evidence(frame)
    size = frame["of_whole"].abs().to_numpy(float)
    order = np.lexsort((-size, pd.Series(evidence).map(EVIDENCE.index), np.isnan(size)))
    return frame.assign(evidence=evidence).iloc[order].reset_index(drop=True)


def _evidence(frame: pd.DataFrame) -> NDArray[np.str_]:
    """Return of each row whether its interval leaves out "no change": clear, chance, or unknown where it has none."""
    of_ratio = frame["low"].isna()
    low = frame["low"].where(~of_ratio, frame["ratio_low"] - 1).to_numpy(float)
    high = frame["high"].where(~of_ratio, frame["ratio_high"] - 1).to_numpy(float)
    return np.where(np.isnan(low), "unknown", np.where((low > 0) | (high < 0), "clear", "chance"))


def _of_nnz(first: Run, run: Run) -> list[dict[str, Any]]:
    """Return the rows of mean nnz and of the share of a layer's neurons that fire; none where a run counts nothing."""
    try:
        of_nnz = compare_means(first, run)
    except Missing:
        return []
    of_nnz["value"] = of_nnz.pop("mean")
    widths = run.neurons / run.layers, first.neurons / first.layers
    share = {"value": of_nnz["value"] / widths[0], "first": of_nnz["first"] / widths[1]}
    share["difference"] = share["value"] - share["first"]
    if widths[0] == widths[1]:
        share |= {name: of_nnz[name] / widths[0] for name in ("low", "high")}
    share |= {name: of_nnz[name] * widths[1] / widths[0] for name in ("ratio", "ratio_low", "ratio_high")}
    share["of_whole"] = share["difference"]
    of_nnz["of_whole"] = of_nnz["difference"] / max(widths)
    return [{"number": "nnz_mean", **of_nnz}, {"number": "firing_share", **share}]


def _counted(numbers: list[dict[str, Any]], same_text: bool) -> list[dict[str, Any]]:
    """Return the rows of dead neurons and of the loss. numbers: `overview` of both runs, the first one first"""
    rows = []
    for name in ("dead_share", "loss"):
        before, after = (one[name] for one in numbers)
        if before is None or after is None:
            continue
        row = {"number": name, "value": after, "first": before}
        counted = [one["tokens"] for one in numbers]
        if same_text if name == "loss" else max(counted) <= ALIKE * min(counted):
            ratio = after / before if before else np.inf if after else 1.0
            row |= {"difference": after - before, "ratio": ratio}
            row["of_whole"] = after - before if name == "dead_share" else ratio - 1
        rows.append(row)
    return rows


def _speeds(numbers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of speedups. The runs are independent, so squares of their half-widths, by logarithms, add up."""
    rows = []
    for name, (value, prefix) in SPEEDS.items():
        before, after = (one[value] for one in numbers)
        if before is None or after is None:
            continue
        ratio = after / before
        ends = np.log([[one[f"{prefix}_{end}"] for end in ("low", "high")] for one in numbers])
        half = np.hypot(*(ends[:, 1] - ends[:, 0]) / 2)
        row = {"number": name, "value": after, "first": before, "difference": after - before, "ratio": ratio}
        row["of_whole"] = 1 / before - 1 / after  # of the dense time: what more or less of it is saved
        rows.append(row | {"ratio_low": ratio * np.exp(-half), "ratio_high": ratio * np.exp(half)})
    return rows


def compare_means(first: Run, run: Run) -> dict[str, float]:
    """Return how two runs' mean nnz over all layers differs, with 95 % intervals. Keys: mean, first; difference, low,
    high; ratio, ratio_low, ratio_high (by their logarithms)."""
    estimates, without, degrees = [], [], []
    paired, totals = same_sequences(first, run), [replicate_totals(one, ["layer"]) for one in (first, run)]
    for sums in same_replicates(*totals) if paired else totals:
        means, each = mean_counts(sums)
        estimates.append(means.mean(keepdims=True))
        without.append(each.mean(axis=0, keepdims=True))
        degrees.append(float(effective_groups(sums).min()) - 1)
    result = {"mean": float(estimates[1][0]), "first": float(estimates[0][0])}
    for scale, back, names in (
        (np.asarray, np.asarray, ("difference", "low", "high")),
        (np.log, np.exp, ("ratio", "ratio_low", "ratio_high")),
    ):
        with np.errstate(divide="ignore", invalid="ignore"):
            a, b = ((scale(mean), scale(rest)) for mean, rest in zip(estimates, without, strict=True))
            difference, error, freedom = apart(a, b, np.array(degrees)[:, None], paired)
            half = t_half(freedom) * error
            ends = back(np.concatenate([difference, difference - half, difference + half]))
        result |= dict(zip(names, map(float, ends), strict=True))
    return result
