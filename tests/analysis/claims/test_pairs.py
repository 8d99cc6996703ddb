"""Pairs of trainings: how they are graded, and what is said of their sizes and times."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from twell.analysis.claims import pairs as module
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, REVERSED, UNTOLD
from twell.analysis.claims.pairs import graded, members, sized, timed
from twell.workbench.errors import Missing


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ([(1.2, 1.1), (1.3, 1.2)], HOLDS),
        ([(1.2, 1.1), (1.2, 1.2)], IN_PART),
        ([(1.2, 1.1), (1.1, 1.2)], IN_PART),
        ([(1.1, 1.2), (1.2, 1.2)], FAILS),
        ([(1.1, 1.2), (0.9, 1.0)], REVERSED),
        ([(1.205, 1.2)], FAILS),  # within noise, half a percent
        ([(1.207, 1.2)], HOLDS),
        ([(1.2, 1.205)], FAILS),
        ([(1.2, 1.207)], REVERSED),
        ([(1.0, 0.8), (0.9, 0.7)], UNTOLD),  # neither gains
        ([(1.0, 0.8), (0.9, 1.01)], IN_PART),
    ],
)
def test_pairs_are_graded_by_all_of_them(gains: list[tuple[float, float]], verdict: str) -> None:
    assert graded(gains) == verdict


def test_trainings_of_one_seed_are_paired_and_of_others_only_where_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def one(name: str, seed: int) -> Any:
        return SimpleNamespace(name=name, seed=seed, recipe={"gated": name == "gated"}, alike=lambda *_: True)

    trainings = [one("gated", 0), one("gated", 1), one("plain", 1), one("plain", 2), one("plain", 0)]
    monkeypatch.setattr(module, "training_outcomes", lambda _: trainings)
    paired = module.pairs([], "gated", bool, "`twell train`")
    assert [(a.name, a.seed, b.name, b.seed) for a, b in paired] == [("gated", n, "plain", n) for n in (0, 1)]
    del trainings[2], trainings[-1]
    paired = module.pairs([], "gated", bool, "`twell train`")
    assert [(a.seed, b.name, b.seed) for a, b in paired] == [(0, "plain", 2)]
    del trainings[2]
    with pytest.raises(Missing, match=r"two trainings of one recipe that differ in gated: `twell train`\."):
        module.pairs([], "gated", bool, "`twell train`")


def training(parameters: float, tokens: float = 0, **speeds: float) -> Any:
    return SimpleNamespace(parameters=parameters, tokens=tokens, speeds=speeds)


def test_sizes_that_differ_by_a_tenth_are_told_apart() -> None:
    """By the greatest of them; tokens a parameter are the mean over models."""
    alike = training(12.3e6, 246e6), training(13.6e6, 544e6)
    assert sized(alike) == "2 models of 12.3 M parameters, 30 tokens a parameter"
    pair = training(12.3e6, 123e6), training(13.7e6, 137e6)
    assert members([pair, pair]) == "4 models of 12.3 to 13.7 M parameters, 10 tokens a parameter"


def test_the_forward_pass_is_compared_where_both_of_a_pair_timed_it_or_else_a_step() -> None:
    nothing = {"model_speedup": np.nan, "step_speedup": np.nan}
    both = training(1, **nothing | {"model_speedup": 1.2}), training(1, **nothing | {"model_speedup": 1.1})
    step = nothing | {"step_speedup": 1.5}
    half = training(1, **{"model_speedup": 1.3, "step_speedup": 1.4}), training(1, **step)
    assert timed([both, half]) == ("the forward pass", [(1.2, 1.1)])
    assert timed([half]) == ("a training step", [(1.4, 1.5)])
    assert timed([(training(1, **nothing), both[0])]) == ("", [])
