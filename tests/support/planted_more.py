"""More of `planted`: intervals of speed, of neurons and of covariates, which come from tables of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from support import synthetic_runs
from support.planted_truths import EFFECT, LOUD, Kind, Truth, moods, z_of_tokens

from twell import analysis
from twell.analysis.ablations.by_condition import paired_change
from twell.analysis.activity.layers import DEAD_BOUND
from twell.analysis.speed.speedup import correlate
from twell.analysis.summaries.built import read_built
from twell.analysis.tokens.identity import COVARIATES
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.writer import RunWriter

PEARSON, LAYERS, SPEEDUP = -0.9, 8, 2.5
RARE = 3.02  # documents in which the neuron fires on average: just past what its bound allows it to be silent in
NEURONS, SHARE, KEEPS, LENGTH = 48, 0.15, 0.4, 24  # of the run of firings: chance to fire, and to stay as it is
CHANGE = 0.5  # nats: what an ablation costs in a sequence of mean mood; it grows with its third power


@cache
def many_moods(kind: Kind) -> np.ndarray:
    """Return moods as good as all of them."""
    return moods(np.random.default_rng(0), 1_000_000, kind)


def timings(seed: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what gives each turn a pace of its own, and every time some noise around a speedup of SPEEDUP."""
    rng = np.random.default_rng((seed, 2))

    def change(table: dict[str, Any]) -> dict[str, Any]:
        turn, sparse = table["batch"], table["op"] == "ffn_sparse"
        pace = rng.lognormal(0, 0.2, int(turn.max()) + 1)[turn] * rng.lognormal(0, 0.05, len(turn))
        return {**table, "microseconds": 400 * pace / np.where(sparse, SPEEDUP, 1)}

    return change


def firings(folder: Path, rng: np.random.Generator, kind: Kind) -> Run:
    """Make a run that records which neurons fired.

    A neuron is a Markov chain: it stays as it is with a chance that differs by sequence as the mood does, else it is
    drawn anew.
    """
    each = kind[0]
    sequences = 48 * each if each > 1 else 80
    keeps = np.clip(KEEPS * moods(rng, sequences, kind), 0, 1)
    fires = np.empty((sequences, LENGTH, NEURONS), bool)
    fires[:, 0] = rng.random((sequences, NEURONS)) < SHARE
    for place in range(1, LENGTH):
        stays = rng.random((sequences, NEURONS)) < keeps[:, None]
        fires[:, place] = np.where(stays, fires[:, place - 1], rng.random((sequences, NEURONS)) < SHARE)
    sequence, position = np.divmod(np.arange(sequences * LENGTH), LENGTH)
    shape = synthetic_runs.Shape(
        layers=1, d_ff=NEURONS, vocab=8, sequences=sequences, of_document=each, neurons=False, tiles=False
    )
    rows = fires.reshape(-1, NEURONS)
    size = len(rows)
    columns = {
        "sequence": sequence.astype(np.int32),
        "position": position.astype(np.int32),
        "token_id": np.ones(size, np.int32),
        "phase": np.zeros(size, np.uint8),
        "flags": np.zeros(size, np.uint8),
        "loss": np.ma.masked_all(size, np.float16),
        "entropy": np.ma.masked_all(size, np.float32),
        "nnz_00": rows.sum(axis=1).astype(np.uint16),
    }
    writer = RunWriter(folder / "firings", synthetic_runs.manifest(shape, "firings"))
    writer.add("vocab", synthetic_runs.vocabulary(shape.vocab))
    neurons = np.split(np.nonzero(rows)[1].astype(np.uint16), np.cumsum(rows.sum(axis=1))[:-1])
    values = [np.ones(len(one), np.float16) for one in neurons]
    place = {"sequence": columns["sequence"], "position": columns["position"], "layer": np.zeros(size, np.int32)}
    writer.add("fired", {**place, "neuron": neurons, "value": values})
    synthetic_runs.add_part(writer, shape, columns, rng)
    writer.finish("complete", loss_sum=0.0, loss_tokens=0)
    return open_run(folder / "firings")


def stated(
    folder: Path, rng: np.random.Generator, kind: Kind, run: Run, effect: np.ndarray, classes: np.ndarray
) -> tuple[dict[str, Any], Truth]:
    """Return more intervals of a planted run, and their true values."""
    bounds, truth = reused(folder, rng, kind)
    documents, each = read_built(run).clusters, kind[0]
    x = rng.normal(size=LAYERS)
    speed = correlate(x, PEARSON * x + np.sqrt(1 - PEARSON**2) * rng.normal(size=LAYERS))
    bounds["nnz and speed"], truth["nnz and speed"] = (speed["low"], speed["high"]), PEARSON
    truth["FFN speedup"] = SPEEDUP
    silent = not rng.binomial(documents, RARE / documents)
    bounds["dead neuron"], truth["dead neuron"] = (0.0, DEAD_BOUND / documents if silent else 1.0), RARE / documents
    cost = CHANGE * moods(rng, documents * each, kind) ** 3 + rng.normal(0, 0.2, documents * each)
    tokens = rng.integers(64, 129, documents * each)
    sums = [values.reshape(-1, each).sum(axis=1) for values in (tokens, cost * tokens)]
    bounds["ablation"], truth["ablation"] = paired_change(*sums)[1:], CHANGE * (many_moods(kind) ** 3).mean()
    bounds["covariate"], truth["covariate"] = covariate(run, effect, classes)
    return bounds, truth


def reused(folder: Path, rng: np.random.Generator, kind: Kind) -> tuple[dict[str, Any], Truth]:
    """Return the intervals of reuse and their true values."""
    run = firings(folder, rng, kind)
    lags = analysis.reuse(run, lags=[1]).set_index("lag")
    cache = analysis.reuse_cache(run, windows=[2]).iloc[0]
    leaves = 1 - np.clip(KEEPS * many_moods(kind), 0, 1)
    missed = (1 - SHARE) * leaves
    return (
        {
            "reuse, one back": tuple(lags.loc[1, ["low", "high"]]),
            "reuse, elsewhere": tuple(lags.loc[0, ["low", "high"]]),
            "cache of two": (cache["low"], cache["high"]),
        },
        {
            "reuse, one back": 1 - missed.mean(),
            "reuse, elsewhere": SHARE,
            "cache of two": 1 - (missed * (1 - SHARE * leaves)).mean(),
        },
    )


def covariate(run: Run, effect: np.ndarray, classes: np.ndarray) -> tuple[tuple[float, float], float]:
    """Return the interval of what z gains where a token begins a word, and what that is of tokens of these classes.

    Effects are drawn around the mean of a class whatever else a token is like: the true coefficients are those of the
    classes' means, with the covariates that the tokens have.
    """
    table = analysis.by_token(run)
    text, token = table["text"].astype(str), table["token_id"].to_numpy()
    row = analysis.token_covariates(run).set_index("covariate").loc["begins_word"]
    columns = {
        "log_count": np.log(table["count"]),
        "begins_word": text.str.startswith(" ").to_numpy(float),
        "has_letter": text.str.contains(r"[^\W\d_]").to_numpy(float),
        "characters": text.str.len(),
        "surprisal_mean": table["surprisal_mean"],
    }
    names = [name for name in COVARIATES if np.ptp(columns[name]) > 0]
    x = np.column_stack([np.ones(len(table)), *(columns[name] for name in names)])
    z = z_of_tokens(effect)[0]
    slope = (z[LOUD] - z[LOUD + 1]) / (effect[LOUD] - effect[LOUD + 1])
    expected = np.where(classes, EFFECT, 0.0)
    expected[LOUD] = effect[LOUD]
    fitted = np.linalg.lstsq(x, slope * expected[token], rcond=None)[0]
    return (row["low"], row["high"]), float(fitted[1 + names.index("begins_word")])
