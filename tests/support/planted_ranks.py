"""The correlations of planted runs without the runs: as many intervals in a minute as `planted` makes in hours.

    PYTHONPATH=tests python -m support.planted_ranks 3000    the coverage of so many runs of each kind: 15 minutes

What `planted` writes into runs is counted by class and group of documents here, by what counts it for summaries, and
handed to the estimators that make `surprisal_correlations`, `surprisal_within` and `entropy_correlation`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from support import synthetic_runs
from support.planted import classes
from support.planted_truths import (
    KINDS,
    LENGTH,
    VOCAB,
    Kind,
    Truth,
    counts,
    effects,
    entropies,
    losses,
    population,
    token_chances,
)

from twell.analysis.activity.entropy import partial_correlation
from twell.analysis.summaries.derived import (
    RANKS,
    correlation_interval,
    count_classes,
    drawn_interval,
    group_degrees,
    rank_correlations,
)
from twell.analysis.summaries.documents import REPLICATES
from twell.analysis.summaries.part_rows import PartRows
from twell.analysis.summaries.part_sums import loss_bins
from twell.analysis.summaries.rank_tables import OF_LOSS, entropy_ranks, ranks, ranks_by_class

DRAWN_EFFECTS = 12  # sets of tokens' effects, which runs have in turn: each takes its own truth
WHOLE = 24_000  # sequences that stand for infinitely many
Estimates = dict[str, tuple[np.ndarray, np.ndarray, float]]  # estimate [1], without each group [group, 1], degrees


def drawn(rng: np.random.Generator, kind: Kind, effect: np.ndarray) -> PartRows:
    """Return the rows of a planted run of one layer, of two sources, with nnz of its only layer."""
    each = kind[0]
    documents = 80 if each == 1 else 48
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, documents * each)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(sequence)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    token = rng.choice(VOCAB, len(sequence), p=token_chances())
    nnz, mood, u = counts(rng, sequence, position, effect[token], kind)
    loss, entropy = losses(rng, mood, u).astype(np.float16), entropies(rng, mood, u).astype(np.float32)
    loss[position == lengths[sequence] - 1] = np.nan
    document, zeros = sequence // each, np.zeros(len(sequence), np.int32)
    return PartRows(
        sequence=sequence,
        position=position,
        token=token,
        flags=(position == 0).astype(np.uint8),
        loss=loss.astype(float),
        phase=zeros,
        entropy=np.where(np.isnan(loss), np.nan, entropy),
        counts=nnz[:, None].astype(np.uint16),
        cluster=document,
        unit=document % (documents // 2),  # its number within its source
        source=zeros,
        place=zeros,
    )


def correlated(rows: dict[str, np.ndarray], values: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return a rank correlation, the same without each group and the degrees; arguments as `rank_correlations` has
    them."""
    return (*rank_correlations(rows, values)[:2], group_degrees(rows))


def columns(table: pa.Table, names: tuple[str, ...] = RANKS) -> dict[str, np.ndarray]:
    """Return columns of a table under the names RANKS."""
    return {name: table[own].to_numpy() for name, own in zip(RANKS, names, strict=True)}


def estimates(rows: PartRows, louder: np.ndarray) -> Estimates:
    """Return the correlations of a run; louder: which tokens are of the class that fires more."""
    bins, replicate = loss_bins(rows.loss), rows.unit % REPLICATES
    own = np.where(rows.follow(), np.append(-1, bins[:-1]), -1)
    fine = columns(ranks(rows, replicate, bins))
    of_counts, of_coarse = (count_classes(int(rows.counts.max()), each) for each in (True, False))
    result = {"spearman": correlated(fine, of_counts), "within tokens": within(rows, bins >= 0)}
    table = ranks_by_class(rows, {"later": bins, "own": own}, louder[rows.token].astype(int))
    of_own, kind, coarse = table["own"].to_numpy(), table["class"].to_numpy(), columns(table)
    for name, chosen in (
        ("spearman, own loss", of_own),
        ("spearman in a class", ~of_own & (kind == 1)),
    ):
        part = {column: values[chosen] for column, values in coarse.items()}
        result[name] = correlated(part, of_coarse)
    table = entropy_ranks(rows, replicate, bins, loss_bins(rows.entropy))
    of_nnz = table["layer"].to_numpy() != OF_LOSS
    names = ("layer", "rank_class", "entropy_class", "replicate", "tokens")
    entropy = correlated(columns(table.filter(pa.array(of_nnz)), names), of_counts)
    of_loss = columns(table.filter(pa.array(~of_nnz)), names)
    of_loss["layer"] = np.zeros_like(of_loss["layer"])
    both = correlated(of_loss, np.full(int(of_loss["nnz_class"].max()) + 1, np.inf))
    for name, first, given in (
        ("entropy given loss", entropy, result["spearman"]),
        ("loss given entropy", result["spearman"], entropy),
    ):
        estimate, without = (partial_correlation(first[i], given[i], both[i]) for i in (0, 1))
        result[name] = (estimate, without, first[2])
    return result


def within(rows: PartRows, known: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Return Pearson's correlation within tokens; known: which rows have a loss."""
    used = known & (rows.flags == 0)
    token, replicate = rows.token[used], rows.unit[used] % REPLICATES
    size = np.maximum(np.bincount(token, minlength=VOCAB), 1)
    nnz, loss = (
        values[used] - (np.bincount(token, values[used], VOCAB) / size)[token]
        for values in (rows.counts[:, 0], rows.loss)
    )
    sums = np.stack([np.bincount(replicate, each, REPLICATES) for each in (nnz * loss, nnz**2, loss**2)])
    tokens = np.bincount(replicate, minlength=REPLICATES)
    whole, left = sums.sum(axis=1, keepdims=True), sums.sum(axis=1, keepdims=True) - sums
    estimate, without = (each[0] / np.sqrt(each[1] * each[2]) for each in (whole, left))
    return estimate, without[:, None], tokens.sum() ** 2 / (tokens**2).sum() - 1


def held(kind: Kind, runs: int, sets: int, whole: int) -> Iterator[dict[str, bool]]:
    """Yield for each run whether the interval of each correlation held the true one.

    sets: how many sets of tokens' effects are drawn; whole: sequences that the true values are taken from
    """
    louder, truths = classes(synthetic_runs), []
    for number in range(sets):
        rng = np.random.default_rng((number, 99))
        effect = effects(rng, louder)
        truths.append((effect, population(effect, rng, kind, louder, (1.0, 2.0), whole)))
    for seed in range(runs):
        effect, truth = truths[seed % sets]
        found = estimates(drawn(np.random.default_rng((seed, 97)), kind, effect), louder)
        yield {name: holds(truth, name, *each) for name, each in found.items()}


def holds(truth: Truth, name: str, estimate: np.ndarray, without: np.ndarray, degrees: float) -> bool:
    low, high = correlation_interval(estimate, without, degrees)
    return bool(low[0] <= truth[name] <= high[0])


def held_of_normal_values(groups: int, samples: int) -> float:
    """Return in what share of samples `drawn_interval` of the mean of normal values, one a group, holds the truth."""
    rng, inside = np.random.default_rng((groups, 96)), 0
    for size in np.diff(np.append(np.arange(0, samples, 1000), samples)):  # a thousand intervals take 100 MB
        values = rng.normal(size=(groups, size))
        without = (values.sum(axis=0) - values) / (groups - 1)
        low, high = drawn_interval(values.mean(axis=0), without, groups - 1.0)
        inside += int(np.count_nonzero((low <= 0) & (high >= 0)))
    return inside / samples


if __name__ == "__main__":
    number = int(sys.argv[1])
    for kind in KINDS:
        table: Counter[str] = Counter()
        for each in held(KINDS[kind], number, DRAWN_EFFECTS, WHOLE):
            table.update({name: int(inside) for name, inside in each.items()})
        for name, inside in table.items():
            print(f"{kind:<24} {name:<28} {100 * inside / number:.1f} % of {number:,}")
