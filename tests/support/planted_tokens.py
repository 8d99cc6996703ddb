"""The tokens of planted runs without the runs: as many intervals of a token's z in seconds as `planted` makes in hours.

What `planted` writes into runs is summed by token and document here, and handed to the estimators that `by_token` uses.
"""

from __future__ import annotations

import numpy as np
from support.planted_truths import LENGTH, VOCAB, Kind, counts, effects, token_chances, z_of_tokens

from twell.analysis.statistics import centred_error, effective, pooled_variance, t_half
from twell.analysis.tokens.by_token import PRIOR_DOCUMENTS

OFTEN = 20  # occurrences from which a token counts, as in `by_token`


def sums(seed: int, kind: Kind, classes: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return sums by token of a planted run of two layers, as `by_token` has them, and the true z of each token."""
    rng, each = np.random.default_rng((seed, 3)), kind[0]
    effect = effects(rng, classes)
    sequences = 80 if each == 1 else 48 * each
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, sequences)
    sequence = np.repeat(np.arange(sequences), lengths)
    position = np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    token = rng.choice(VOCAB, len(sequence), p=token_chances())
    z, used = np.zeros(len(sequence)), position > 0
    for _ in range(2):
        nnz, *_ = counts(rng, sequence, position, effect[token], kind)
        z += (nnz - nnz[used].mean()) / nnz[used].std() / 2
    sequence, token, z = sequence[used], token[used], z[used]
    documents = sequences // each
    cell, shape = token * documents + sequence // each, (VOCAB, documents)
    n, y = (np.bincount(cell, weights, np.prod(shape)).reshape(shape) for weights in (np.ones(len(z)), z))
    of_all, here = y.sum(axis=0), n.sum(axis=1) > 0
    n, y = n[here], y[here]
    columns = {"n": n, "n2": n**2, "y": y, "y2": y**2, "ny": n * y, "beside": y * of_all, "n_beside": n * of_all}
    table = {name: values.sum(axis=1) for name, values in columns.items()}
    table |= {"all_square": (of_all**2).sum(), "all_n": len(z), "token": here.nonzero()[0]}
    return table, z_of_tokens(effect)[0]


def held(seed: int, kind: Kind, classes: np.ndarray) -> np.ndarray:
    """Return of the tokens that occur often: token, its true z, whether the interval of its z holds that [3, token]."""
    table, truth = sums(seed, kind, classes)
    five = [table[name] for name in ("n", "n2", "y", "y2", "ny")]
    error = centred_error(five, *(table[name] for name in ("beside", "n_beside", "all_square", "all_n")))
    n, clusters, z = table["n"], effective(table["n"], table["n2"]), table["y"] / table["n"]
    variance, degrees = pooled_variance(error**2, n, clusters, z, PRIOR_DOCUMENTS)
    inside = np.abs(z - truth[table["token"]]) <= t_half(degrees) * np.sqrt(variance)
    often = n >= OFTEN
    return np.stack([table["token"], truth[table["token"]], inside])[:, often]
