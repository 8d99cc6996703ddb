"""Count how often the interval of a class of tokens holds the mean of what it was drawn from.

    PYTHONPATH=.ns:tests python tests/support/class_coverage.py RUN [REPEATS]    200 repeats: seconds

The population of a class is its tokens in the run, with the frequencies and mean z that they really have: most of its
occurrences belong to few tokens. A repeat draws as many of them again, with replacement, and asks for the interval as
`token_classes` states it of a class with as many effective tokens as the run's own. For function words and parts of
URLs, which are lists, and for differences, groups of documents are drawn instead.
"""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np

from twell.analysis.statistics import distinct, effective, jackknife_error, t_half
from twell.analysis.summaries.read import Summaries, open_summaries
from twell.analysis.summaries.token_class import CLASSES
from twell.analysis.tokens.by_token import token_totals
from twell.analysis.tokens.classes import (
    CLOSED,
    LEAST_TOKENS,
    LEAST_UNITS,
    _kinds,
    _rows,
    group_sums,
    standardised,
)
from twell.workbench.run.store import Run, open_run


def open_classes(run: Run, summaries: Summaries, rng: np.random.Generator, repeats: int) -> dict[str, list[bool]]:
    """Return for each open class whether each stated interval held its mean z."""
    rows = token_totals(summaries, False)
    number, index = distinct(_kinds(summaries, rows["token_id"]))
    names = [CLASSES[kind].as_py() for kind in number.tolist()]
    n, z = (np.bincount(index, rows[name].astype(float)) for name in ("tokens", "z_sum"))
    truth = dict(zip(names, z / n, strict=True))
    members = [np.flatnonzero(index == kind) for kind in range(len(names))]
    units = effective(n, np.bincount(index, rows["tokens"].astype(float) ** 2))
    held: dict[str, list[bool]] = {
        name: [] for name, unit in zip(names, units, strict=True) if name not in CLOSED and unit >= LEAST_TOKENS
    }
    for _ in range(repeats):
        drawn = np.concatenate([rng.choice(tokens, len(tokens)) for tokens in members])
        table = _rows(run, {name: values[drawn] for name, values in rows.items()}, names, index[drawn])
        t = t_half(table["effective"].to_numpy() - 1)
        for name, z, half in zip(table["class"], table["z"], t * table["z_se"], strict=True):
            if name in held:
                held[name].append(bool(abs(z - truth[name]) <= half))
    return held


def closed_classes(summaries: Summaries, rng: np.random.Generator, repeats: int) -> dict[str, list[bool]]:
    """Return the same for the classes that are lists, and for the difference of every class from all others, by groups
    of documents."""
    names = np.unique(summaries.columns("class_layers", "class")["class"].astype(str))
    sums = group_sums(summaries, names)
    size, groups = sums[0][:, 0], sums[0].shape[2]
    own, others = standardised(*(each.sum(axis=2) for each in sums))
    truth = {"": own, ", difference": own - others}
    stated = effective(size.sum(axis=1), (size**2).sum(axis=1)) >= LEAST_UNITS
    held: dict[str, list[bool]] = {}
    for _ in range(repeats):
        chosen = rng.integers(groups, size=groups)
        drawn = [each[:, :, chosen] for each in sums]
        own, others = standardised(*(each.sum(axis=2) for each in drawn))
        left, left_others = standardised(*(each.sum(axis=2, keepdims=True) - each for each in drawn))
        size = drawn[0][:, 0]
        t = t_half(effective(size.sum(axis=1), (size**2).sum(axis=1)) - 1)
        for what, here, without in (("", own, left), (", difference", own - others, left - left_others)):
            half = t * jackknife_error(here, without.T)
            for name, inside, told in zip(names, np.abs(here - truth[what]) <= half, stated, strict=True):
                if told and (what or name in CLOSED):
                    held.setdefault(name + what, []).append(bool(inside))
    return held


def main() -> None:
    """Print the share of intervals that held, by class, and how many were stated."""
    run, repeats = open_run(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200
    summaries, rng = open_summaries(run, scored=True), np.random.default_rng(0)
    results = open_classes(run, summaries, rng, repeats) | closed_classes(summaries, rng, repeats)
    for name, held in results.items():
        counted = Counter(held)
        share = f"{100 * counted[True] / len(held):.1f} %" if held else "none stated"
        print(f"{name:<36} {share:>12} of {len(held)}")


if __name__ == "__main__":
    main()
