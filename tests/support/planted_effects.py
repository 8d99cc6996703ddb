"""Rows of the table `effects` with a planted change of the loss, and how often its interval holds it.

    python -m support.planted_effects 1000      the coverage of 1 000 repeats, for several numbers of documents

Documents differ in length (log-normal), in loss, and in what a condition does to them (gamma, skewed): half of the
variance of a token's change is between documents, and tokens of one share it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from twell.analysis.ablations.by_condition import paired_change
from twell.workbench.ablations.appended import append
from twell.workbench.run.store import Run, open_run

CHANGE = 0.05  # nats a token, over all documents that there could be


def rows_of(
    rng: np.random.Generator, study: int = 0, documents: int = 60, condition: str = "weakest:0.5", **about: Any
) -> tuple[dict[str, Any], float]:
    """Return columns of a study of one condition, and the planted mean change in nats a token.

    rng: draws the documents; about: columns that all rows share
    """
    tokens = np.maximum(2, rng.lognormal(6, 0.8, documents).astype(int))
    of_document = rng.gamma(0.5, CHANGE / 0.5, documents)  # a few documents suffer most
    change = tokens * of_document + rng.normal(0, 0.07, documents) * np.sqrt(tokens)
    base = tokens * rng.normal(4, 0.5, documents)
    same = {
        "study": study, "condition": condition, "kind": "weakest", "layer": -1, "share": None, "silenced": None,
        "batch": 0, "source": "made", "piece": 0, **about,
    }  # fmt: skip
    columns: dict[str, Any] = {name: [value] * documents for name, value in same.items()}
    fired = 20 * tokens
    columns |= {"document": np.arange(documents), "tokens": tokens, "base_sum": base, "loss_sum": base + change}
    return {**columns, "firings": fired // 2, "base_firings": fired}, CHANGE


def add_effects(run: Run) -> Run:
    """Append a study of one condition and estimates of every neuron to a run, and return it."""
    append(run.path, "effects", rows_of(np.random.default_rng(0))[0])
    layer, neuron = (index.ravel() for index in np.indices((run.layers, run.d_ff)))
    estimate = {"layer": layer, "neuron": neuron, "estimate_sum": np.sin(neuron), "tokens": np.full(len(layer), 500)}
    append(run.path, "neuron_effects", estimate)
    return open_run(run.path)


def coverage(repeats: int, documents: int = 60, seed: int = 0) -> float:
    """Return the share of repeats whose interval holds the planted change."""
    held = 0
    for repeat in range(repeats):
        columns, planted = rows_of(np.random.default_rng([seed, documents, repeat]), documents=documents)
        _, low, high = paired_change(columns["tokens"], columns["loss_sum"] - columns["base_sum"])
        held += low <= planted <= high
    return held / repeats


if __name__ == "__main__":
    for number in (20, 40, 60, 120, 500):
        repeats = int(sys.argv[1])
        print(f"{number} documents: {coverage(repeats, number):.1%} of {repeats:,}")
