"""What the runs of `planted` are drawn from, and so the true values of what is stated of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

A, B, DECAY, SHAPE, SHARED = 20.0, 40.0, 12.0, 9.0, 0.2
VOCAB, LENGTH = 200, 128
LOUD, EFFECT, SPREAD = 40, 0.3, 0.15  # a class more, in sds of tokens: EFFECT / SPREAD
POPULATION = 4000  # sequences that stand for infinitely many: they widen errors by 3 % at most

# By name: sequences a document, and the share of the mood's variance that they have in common.
KINDS = {"independent sequences": (1, 0.0), "documents of five, half": (5, 0.5), "documents of five, 0.9": (5, 0.9)}

Kind, Truth = tuple[int, float], dict[str, Any]


def token_chances() -> np.ndarray:
    weights = np.append(0, 1 / np.arange(1, VOCAB) ** 0.8)
    return weights / weights.sum()


def effects(rng: np.random.Generator, classes: np.ndarray) -> np.ndarray:
    """Draw each token's effect: normal around the mean of its class, 0 or EFFECT; LOUD apart."""
    drawn = rng.normal(np.where(classes, EFFECT, 0.0), SPREAD)
    drawn[LOUD] = 0.55
    return np.maximum(drawn, -0.9)


def moods(rng: np.random.Generator, sequences: int, kind: Kind) -> np.ndarray:
    """Draw each sequence's mood: mean 1, variance 1 / SHAPE, of which documents share what their kind says."""
    each, share = kind
    own, shared = (rng.gamma(SHAPE, 1 / SHAPE, sequences) - 1 for _ in range(2))
    shared = shared[np.arange(sequences) // each]
    return np.maximum(1 + np.sqrt(1 - share) * own + np.sqrt(share) * shared, 0.02)


def level(position: np.ndarray) -> np.ndarray:
    """Return mean nnz at each position, for a token without an effect and a mood of 1."""
    return A + B * np.exp(-position / DECAY)


def counts(
    rng: np.random.Generator,
    sequence: np.ndarray,
    position: np.ndarray,
    effect: np.ndarray,
    kind: Kind,
    gain: float = 1.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw nnz of one layer for each token; return it with the token's mood and u."""
    mood = moods(rng, sequence.max() + 1, kind)[sequence]
    u = rng.normal(size=len(sequence))
    return rng.poisson(gain * mood * level(position) * (1 + effect) * np.exp(SHARED * u)), mood, u


def losses(rng: np.random.Generator, mood: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Draw the loss of each token, in nats."""
    return np.exp(0.6 + 0.5 * np.log(mood) + 0.5 * u + rng.normal(0, 0.4, len(u)))


def entropies(rng: np.random.Generator, mood: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Draw the entropy of each prediction, in nats."""
    return np.exp(0.5 + 0.6 * np.log(mood) + 0.3 * u + rng.normal(0, 0.3, len(u)))


def scale(effect: np.ndarray, gain: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return mean and sd of nnz of a layer at positions from 1 on, the last entry of each over all of them, and the
    weight of each position. Lengths are uniform from LENGTH / 2 to LENGTH."""
    chance, own = token_chances(), gain * np.exp(SHARED**2 / 2)
    position = np.arange(1, LENGTH)
    weight = np.clip((LENGTH - position) / (LENGTH // 2 + 1), 0, 1)
    weight /= weight.sum()
    mean = level(position) * own * (chance @ (1 + effect))
    noise = (1 + 1 / SHAPE) * np.exp(2 * SHARED**2) * (chance @ (1 + effect) ** 2)
    second = mean + (gain * level(position)) ** 2 * noise
    mean, second = np.append(mean, weight @ mean), np.append(second, weight @ second)
    return mean, np.sqrt(second - mean**2), weight


def z_of_tokens(effect: np.ndarray, gain: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return z and z_position of each token, the latter by bands of positions."""
    mean, sd, weight = scale(effect, gain)
    factor = (1 + effect) / (token_chances() @ (1 + effect))
    position = np.arange(1, LENGTH)
    band = np.where(position < 8, position, np.floor(np.sqrt(8.0 * position))).astype(int)
    n, first = np.bincount(band, weight), np.bincount(band, weight * mean[:-1])
    second = np.bincount(band, weight * (sd[:-1] ** 2 + mean[:-1] ** 2))
    used = n > 0
    centre, square = first[used] / n[used], second[used] / n[used]
    shares = n[used] / np.sqrt(square - centre**2)
    return (factor - 1) * mean[-1] / sd[-1], (factor - 1) * (shares @ centre)


def truths(effect: np.ndarray, classes: np.ndarray, gain: float) -> Truth:
    """Return the true values of layer 1 over unflagged tokens. gain: of the runs that are compared with."""
    chance, position = token_chances(), np.arange(1, LENGTH)
    mean, sd, weight = scale(effect, 1.0)
    z, z_position = z_of_tokens(effect)
    later = np.average(mean[:-1], weights=weight)
    half, early, late, band = position >= LENGTH // 2, position < 8, position > 60, (position > 17) & (position < 22)

    def over(chosen: np.ndarray) -> float:
        return float(np.average(mean[:-1][chosen], weights=weight[chosen]))

    expected = np.where(classes, EFFECT, 0.0)
    expected[LOUD] = effect[LOUD]
    louder = np.average(expected[classes], weights=chance[classes])
    apart = [np.average(z[chosen], weights=chance[chosen]) for chosen in (classes, ~classes)]
    rise = z_of_tokens(effect, gain)[0] - z
    truth: Truth = {
        "layer mean": later,
        "source mean": later,
        "source ratio": 1.0,
        "phase ratio": over(half) / over(~half),
        "first position": (A + B) / np.average(level(position), weights=weight),
        "position mean": mean[19],
        "decay": DECAY,
        "drop": over(early) - over(late),
        "token z": z,
        "token z by position": z_position,
        "token shrunk": z,
        "token mean": mean[-1] * (1 + effect) / (chance @ (1 + effect)),
        "loud token": z[LOUD],
        "quiet token": z[LOUD + 1],
        "token in a layer": z[LOUD],
        "word": z[LOUD],
        "class mean": ((1 + louder) / (chance @ (1 + effect)) - 1) * mean[-1] / sd[-1],
        "class difference": apart[0] - apart[1],
        "class effect": EFFECT / SPREAD,
    }
    for text in ("", ", other text"):
        truth[f"runs, layer{text}"] = (gain - 1) * later
        truth[f"runs, positions{text}"] = (gain - 1) * over(band)
        truth[f"runs, token{text}"] = rise[LOUD]
    return truth


def population(
    effect: np.ndarray,
    rng: np.random.Generator,
    kind: Kind,
    classes: np.ndarray,
    edges: tuple[float, float],
    sequences: int = POPULATION,
) -> Truth:
    """Return what the sample estimates and has no formula, from many documents of one sequence. edges: of the bin of
    losses; sequences: how many documents."""
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, sequences)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    token = rng.choice(VOCAB, len(position), p=token_chances())
    nnz, mood, u = counts(rng, sequence, position, effect[token], (1, kind[1]))
    other, *_ = counts(rng, sequence, position, effect[token], (1, kind[1]))
    loss = losses(rng, mood, u)
    own, inner = np.append(np.nan, loss[:-1]), position > 0
    known = inner & (position < lengths[sequence] - 1)  # the last token of a sequence has no loss
    inside = known & (loss >= edges[0]) & (loss < edges[1])
    size = np.bincount(token[known], minlength=VOCAB)
    centred = [
        values[known] - (np.bincount(token[known], values[known], VOCAB) / np.maximum(size, 1))[token[known]]
        for values in (nnz, loss)
    ]

    def spearman(a: np.ndarray, b: np.ndarray, chosen: np.ndarray) -> float:
        return float(stats.spearmanr(a[chosen], b[chosen]).statistic)

    inverse = np.linalg.inv(stats.spearmanr(np.stack([nnz, loss, entropies(rng, mood, u)])[:, known], axis=1).statistic)
    given = -inverse / np.sqrt(np.outer(np.diag(inverse), np.diag(inverse)))  # each pair given the third
    return {
        "loss given entropy": float(given[0, 1]),
        "entropy given loss": float(given[0, 2]),
        "loss bin": float(nnz[inside].mean()),
        "spearman": spearman(nnz, loss, known),
        "spearman, own loss": spearman(nnz, own, inner),
        "spearman in a class": spearman(nnz, loss, known & classes[token]),
        "within tokens": float(np.corrcoef(*centred)[0, 1]),
        "next layer": spearman(other, nnz, inner),
    }
