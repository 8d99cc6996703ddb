"""Pairs of trainings of one recipe that differ in one field: what claims between models compare.

A verdict goes by all pairs. Shared by the checks of `across`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, REVERSED, UNTOLD
from twell.analysis.training import TrainingOutcome, training_outcomes
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

NEITHER = "neither gains: sparse kernels lose time at this size"
NOISE = 0.005  # difference of two speedups that may be chance
TrainingPair = tuple[TrainingOutcome, TrainingOutcome]


def pairs(
    runs: Sequence[Run], field: str, test: Callable[[Any], bool], command: str, apart: tuple[str, ...] = ()
) -> list[TrainingPair]:
    """Return pairs of trainings of one recipe but for a field: one whose value meets the test, and one whose does not.

    apart: further fields in which they may differ. Of pairs of one seed all are returned; without any, the first of
    different seeds. Missing, with the command, where there is none.
    """
    all_trainings = training_outcomes(runs)
    matched = [
        (one, other)
        for one in all_trainings
        for other in all_trainings
        if test(one.recipe.get(field)) and not test(other.recipe.get(field)) and one.alike(other, field, *apart)
    ]
    if not matched:
        raise Missing(f"It takes two trainings of one recipe that differ in {field}: {command}.")
    return [pair for pair in matched if pair[0].seed == pair[1].seed] or matched[:1]


def sized(results: Sequence[TrainingOutcome]) -> str:
    """Return how many models, how large, and on how many tokens a parameter they were trained, in words."""
    sizes = [one.parameters / 1e6 for one in results]
    tokens = np.mean([one.tokens / (one.parameters or 1) for one in results])
    span = f"{min(sizes):.3g}" if np.ptp(sizes) < 0.1 * max(sizes) else f"{min(sizes):.3g} to {max(sizes):.3g}"
    return f"{len(results)} models of {span} M parameters, {tokens:.2g} tokens a parameter"


def members(both: Sequence[TrainingPair]) -> str:
    """Return `sized` of the models of all pairs."""
    return sized([one for pair in both for one in pair])


def named(both: Sequence[TrainingPair]) -> tuple[str, ...]:
    """Return the names of the trainings of all pairs."""
    return tuple(one.name for pair in both for one in pair)


def loss_of(results: Sequence[TrainingOutcome]) -> str:
    """Return which loss of trainings is compared, in words: where none was measured on held-out text, of training."""
    heldout = [one.heldout for one in results]
    return "held-out loss" if all(heldout) else "held-out or training loss" if any(heldout) else "training loss"


def listed(values: Sequence[float], form: str) -> str:
    """Return numbers in words, one a pair."""
    return " and ".join(format(value, form) for value in values)


def of_seeds(count: int) -> str:
    """Return why there is no interval over so many pairs of trainings."""
    return "none: one training of each" if count == 1 else f"none: {count} pairs of trainings, of a seed each"


def timed(both: Sequence[TrainingPair]) -> tuple[str, list[tuple[float, float]]]:
    """Return what was timed of any pair, the forward pass or else a training step, and both gains of each such pair."""
    for name, what in (("model_speedup", "the forward pass"), ("step_speedup", "a training step")):
        gains = [(one.speeds[name], other.speeds[name]) for one, other in both]
        gains = [each for each in gains if not np.isnan(sum(each))]
        if gains:
            return what, gains
    return "", []


def graded(gains: Sequence[tuple[float, float]]) -> str:
    """Return the verdict on a claim that the first of each pair of gains is the greater: in all, in some, or in none.

    A ratio within NOISE of 1 tells neither; where no side gains anything, it cannot be told.
    """
    if max(max(pair) for pair in gains) <= 1:
        return UNTOLD
    ratios = np.array([one / other for one, other in gains])
    better, worse = ratios > 1 + NOISE, ratios < 1 - NOISE
    return HOLDS if better.all() else IN_PART if better.any() else REVERSED if worse.all() else FAILS


def ruled(verdict: str, rule: str) -> str:
    """Return the rule, after the reason why there is no verdict where neither side gained."""
    return f"{NEITHER}; it takes: {rule}" if verdict == UNTOLD else rule
