"""Runs whose truth is known, to count how often a stated interval holds it.

    PYTHONPATH=tests python -m support.planted 200    so many runs of each kind: ten minutes on one core

nnz is Poisson around mood · (A + B·exp(-p/λ)) · (1 + effect of the token) · exp(0.2 u). The mood is shared by a
sequence (it alone makes a correlation of 0.6 within), and a share of its variance by the sequences of one document
(KINDS); u is a token's own and moves its loss too. Effects of tokens
differ by class; LOUD is always loud. A neuron fires in a few sequences, on a third of their tokens; speed follows nnz
over layers with a Pearson correlation of -0.9.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from scipy import stats
from support import synthetic_runs

from twell.analysis import by_layer, by_position, by_token, ensure, position_fit, surprisal_correlation, token_classes
from twell.analysis.activity.layers import DEAD_BOUND
from twell.analysis.speed.speedup import correlate
from twell.analysis.summaries.built import read_built
from twell.analysis.summaries.token_class import classify
from twell.workbench.run.store import Run

A, B, DECAY, SHAPE, SHARED = 20.0, 40.0, 12.0, 9.0, 0.2
VOCAB, SEQUENCES, LENGTH = 200, 80, 128
LOUD, EFFECT, SPREAD = 40, 0.3, 0.15  # a class more, in sds of tokens: EFFECT / SPREAD
PEARSON, LAYERS = -0.9, 8
RARE = 3.02  # sequences in which the neuron fires on average: just past what its bound allows it to be silent in

# By name: sequences a document, and the share of the mood's variance that they have in common.
KINDS = {"independent sequences": (1, 0.0), "documents of five, half": (5, 0.5), "documents of five, 0.9": (5, 0.9)}
DOCUMENTS = 48  # at least, so that sources are not cut into blocks

Truth = dict[str, float]


def token_chances() -> np.ndarray:
    weights = np.append(0, 1 / np.arange(1, VOCAB) ** 0.8)
    return weights / weights.sum()


def effects(rng: np.random.Generator, classes: np.ndarray) -> np.ndarray:
    """Draw each token's effect: normal around the mean of its class, 0 or EFFECT; LOUD apart."""
    drawn = rng.normal(np.where(classes, EFFECT, 0.0), SPREAD)
    drawn[LOUD] = 0.55
    return np.maximum(drawn, -0.9)


def moods(rng: np.random.Generator, sequences: int, kind: str) -> np.ndarray:
    """Draw each sequence's mood: mean 1, variance 1 / SHAPE, of which documents share what their kind says."""
    each, share = KINDS[kind]
    own, shared = (rng.gamma(SHAPE, 1 / SHAPE, sequences) - 1 for _ in range(2))
    shared = shared[np.arange(sequences) // each]
    return np.maximum(1 + np.sqrt(1 - share) * own + np.sqrt(share) * shared, 0.02)


def counts(
    rng: np.random.Generator, sequence: np.ndarray, position: np.ndarray, effect: np.ndarray, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """Draw nnz of one layer, and the loss, for each token."""
    mood = moods(rng, sequence.max() + 1, kind)[sequence]
    u = rng.normal(size=len(sequence))
    rate = mood * (A + B * np.exp(-position / DECAY)) * (1 + effect) * np.exp(SHARED * u)
    return rng.poisson(rate), np.exp(0.6 + 0.5 * np.log(mood) + 0.5 * u + rng.normal(0, 0.4, len(u)))


def planted(made: ModuleType, path: Path, seed: int, kind: str) -> tuple[Run, np.ndarray]:
    """Make a run; return it with the effects of its tokens."""
    rng, each = np.random.default_rng(seed), KINDS[kind][0]
    kinds = [classify(text) for text in made.vocabulary(VOCAB)["text"]]
    effect = effects(rng, np.array(kinds) == "word-initial piece")

    def change(columns: dict[str, Any]) -> dict[str, Any]:
        columns["token_id"] = rng.choice(VOCAB, len(columns["flags"]), p=token_chances()).astype(np.int32)
        for name in ("nnz_00", "nnz_01"):
            nnz, loss = counts(rng, columns["sequence"], columns["position"], effect[columns["token_id"]], kind)
            columns[name] = np.minimum(nnz, 511).astype(np.uint16)
        columns["loss"] = np.ma.masked_array(loss.astype(np.float16), columns["loss"].mask)
        columns["flags"] = np.where(columns["position"] == 0, 2, 0).astype(np.uint8)
        return columns

    several = {"vocab": VOCAB, "sequences": max(SEQUENCES, DOCUMENTS * each), "length": LENGTH, "of_document": each}
    shape = made.Shape(layers=2, parts=1, neurons=False, tiles=False, timings=0, **several)
    return made.make(path, shape, change=change), effect


def truths(effect: np.ndarray, spearman: float, documents: int) -> Truth:
    """Return the true values of layer 1 over unflagged tokens: moments of the mixture.

    Lengths are uniform from LENGTH / 2 to LENGTH.
    """
    chance, own = token_chances(), np.exp(SHARED**2 / 2)
    position = np.arange(1, LENGTH)
    reached = np.clip((LENGTH - position) / (LENGTH // 2 + 1), 0, 1)
    level = A + B * np.exp(-position / DECAY)
    weight = reached / reached.sum()
    mean = (weight @ level) * own * (chance @ (1 + effect))
    second = (weight @ level**2) * (1 + 1 / SHAPE) * np.exp(2 * SHARED**2) * (chance @ (1 + effect) ** 2)
    sd = np.sqrt(mean + second - mean**2)
    z = ((weight @ level) * own * (1 + effect) - mean) / sd
    return {
        "layer mean": mean,
        "position mean": level[19] * own * (chance @ (1 + effect)),
        "decay": DECAY,
        "loud token": z[LOUD],
        "quiet token": z[LOUD + 1],
        "spearman": spearman,
        "class effect": EFFECT / SPREAD,
        "dead neuron": RARE / documents,
        "nnz and speed": PEARSON,
    }


def population_spearman(effect: np.ndarray, rng: np.random.Generator) -> float:
    """Return the rank correlation of nnz and loss over many short sequences, which the sample estimates."""
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, 3000)
    sequence = np.repeat(np.arange(len(lengths)), lengths - 2)
    position = np.concatenate([np.arange(1, n - 1) for n in lengths])
    tokens = effect[rng.choice(VOCAB, len(position), p=token_chances())]
    nnz, loss = counts(rng, sequence, position, tokens, "independent sequences")
    return float(stats.spearmanr(nnz, loss).statistic)


def intervals(run: Run, rng: np.random.Generator) -> dict[str, tuple[float, float]]:
    """Return the intervals that the API states of layer 1, or of the whole."""
    layer = by_layer(run).iloc[1]
    positions = by_position(run).query("layer == 1 and position == 20").iloc[0]
    fit = position_fit(run).query("layer == 1").iloc[0]
    tokens = by_token(run).set_index("token_id")
    classes = token_classes(run).set_index("class")
    bounds = {
        "layer mean": (layer["low"], layer["high"]),
        "position mean": (positions["low"], positions["high"]),
        "decay": (fit["decay_low"], fit["decay_high"]),
        "spearman": tuple(surprisal_correlation(run).loc[1, ["low", "high"]]),
        "class effect": tuple(classes.loc["word-initial piece", ["effect_low", "effect_high"]]),
    }
    documents = read_built(run).clusters
    silent = not rng.binomial(documents, RARE / documents)
    bounds["dead neuron"] = (0.0, DEAD_BOUND / documents if silent else 1.0)
    x = rng.normal(size=LAYERS)
    speed = correlate(x, PEARSON * x + np.sqrt(1 - PEARSON**2) * rng.normal(size=LAYERS))
    bounds["nnz and speed"] = (speed["low"], speed["high"])
    for name, token in (("loud token", LOUD), ("quiet token", LOUD + 1)):
        half = stats.t.ppf(0.975, tokens.loc[token, "effective"] - 1) * tokens.loc[token, "z_se"]
        bounds[name] = (tokens.loc[token, "z"] - half, tokens.loc[token, "z"] + half)
    return bounds


def coverage(made: ModuleType, repeats: int, first: int = 0, kind: str = "documents of five, half") -> dict[str, int]:
    """Return in how many runs the interval of each quantity held the true value."""
    held: Counter[str] = Counter()
    for seed in range(first, first + repeats):
        rng = np.random.default_rng((seed, 1))
        with tempfile.TemporaryDirectory() as folder:
            run, effect = planted(made, Path(folder) / "run", seed, kind)
            ensure(run)
            truth = truths(effect, population_spearman(effect, rng), read_built(run).clusters)
            held.update(name for name, (low, high) in intervals(run, rng).items() if low <= truth[name] <= high)
    return dict(held)


if __name__ == "__main__":
    number, start = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    tables = {kind: coverage(synthetic_runs, number, start, kind) for kind in KINDS}
    print("| interval | " + " | ".join(KINDS) + " |")
    for name in sorted(tables["independent sequences"]):
        print(
            f"| {name} | "
            + " | ".join(f"{100 * table.get(name, 0) / number:.1f} %" for table in tables.values())
            + " |"
        )
