"""Entropy: does a token fire more neurons where the model expects to be wrong, or where it turns out to be?

The loss of the next token is what the model's prediction cost; the prediction's entropy is what it expected to cost,
before the token was known. While a token is computed, its neurons can follow the second alone: the first they can
follow only as far as the second tells it. Partial rank correlations take the two apart.

    entropy_correlation(run)     rank correlations of nnz with entropy and loss, and with each given the other, by layer

Only runs that recorded the entropy can tell (`twell capture`, without --no-loss). Cost: 30 ms.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from twell.analysis.summaries.derived import (
    RANKS,
    correlation_interval,
    count_classes,
    group_degrees,
    rank_correlations,
)
from twell.analysis.summaries.rank_tables import OF_LOSS
from twell.analysis.summaries.read import Summaries, open_summaries
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

RELATIONS = ("entropy", "loss", "entropy given loss", "loss given entropy")


def entropy_correlation(run: Run) -> pd.DataFrame:
    """Return rank correlations of nnz with the entropy of the next token's prediction, with its loss, and with each of
    them given the other. Columns: of (entropy, loss, entropy given loss, loss given entropy); layer; spearman; low,
    high (95 %); n (tokens).

    Given the other: the partial rank correlation, that of what is left of both once a line through the other's ranks is
    taken away. Correlations come from tables of classes, as those of surprisal_correlation do, and so do the intervals;
    partial ones are within 0.01 of the exact values' (0.04 where a fifth of the text repeats one word). Empty where all
    counts, losses or entropies are the same.

    Missing where predictions lack an entropy, as in older parts and with --no-loss.
    """
    summaries = open_summaries(run)
    of_entropy, between = _entropy_ranks(summaries)
    ranks = summaries.columns("surprisal_ranks", *RANKS)
    n, of_all = int(between["tokens"].sum()), int(ranks["tokens"][ranks["layer"] == 0].sum())
    if n < of_all:
        raise Missing(
            f"{run.name} holds the entropy of {n:,} of {of_all:,} predictions, as older parts lack it: capture the "
            "text anew with `twell capture`."
        )
    counts = count_classes(int(ranks["nnz_class"].max()) + 1, fine=True)
    nats = np.full(int(between["nnz_class"].max()) + 1, np.inf)  # losses that a class holds
    entropy, loss, both = (
        rank_correlations(*each)[:2] for each in ((of_entropy, counts), (ranks, counts), (between, nats))
    )
    given_loss, given_entropy = (
        [partial_correlation(*each) for each in zip(*three, strict=True)]
        for three in ((entropy, loss, both), (loss, entropy, both))
    )
    tables = []
    for of, (estimate, without) in zip(RELATIONS, (entropy, loss, given_loss, given_entropy), strict=True):
        low, high = correlation_interval(estimate, without, group_degrees(ranks))
        columns = {"spearman": estimate, "low": low, "high": high}
        tables.append(pd.DataFrame({"of": of, "layer": np.arange(run.layers), **columns, "n": n}))
    frame, groups = pd.concat(tables, ignore_index=True), len(np.unique(ranks["replicate"]))
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": f"over unflagged tokens that have a loss; intervals from {groups} groups of documents, each left out "
        "once",
    }
    return frame


def _entropy_ranks(summaries: Summaries) -> tuple[dict[str, NDArray], dict[str, NDArray]]:
    """Return classes of nnz by classes of entropy, and of the loss by classes of entropy, both as columns RANKS."""
    names = dict(zip(RANKS, ("layer", "rank_class", "entropy_class", "replicate", "tokens"), strict=True))
    rows = summaries.columns("entropy_ranks", *names.values())
    of_loss = rows["layer"] == OF_LOSS
    of_nnz, between = ({name: rows[names[name]][chosen] for name in RANKS} for chosen in (~of_loss, of_loss))
    return of_nnz, {**between, "layer": np.zeros_like(between["layer"])}


def partial_correlation(of_a: NDArray, of_b: NDArray, between: NDArray) -> NDArray:
    """Return the correlation with a given b, from those with a, with b, and between the two."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.clip((of_a - of_b * between) / np.sqrt((1 - of_b**2) * (1 - between**2)), -1, 1)
