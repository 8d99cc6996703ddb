"""Claims about what can go, on studies whose truth is planted, and on runs without such studies. Cost: 3 s."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.planted_effects import rows_of

from twell.analysis.ablations.by_condition import effects
from twell.analysis.claims.ablations import (
    _of_chance,
    _verdict_on_importance,
    activity_is_importance,
    half_can_go,
    silent_can_go,
)
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, REVERSED, UNTOLD, Answer, between
from twell.analysis.claims.findings import findings
from twell.analysis.figures.claims.evidence import drawing
from twell.analysis.neurons.by_neuron import by_neuron
from twell.analysis.neurons.effects import rank_correlation
from twell.workbench.ablations.appended import append
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.tables.effects import OWN_TOKENS


def studied(run: Run, rise: float, text: str = "other.txt", documents: int = 60, **about: Any) -> Run:
    """Append a study whose loss rises by a share, by a little more or less in each document; return the run."""
    rng = np.random.default_rng(1)
    columns, _ = rows_of(rng, documents=documents, **about)
    columns["loss_sum"] = columns["base_sum"] * (1 + rise) + rng.normal(0, 1e-4, documents) * columns["base_sum"]
    entry = {"study": 0, "tokens": 1, "seconds": 0.0, "complete": True, "text": [text]}
    append(run.path, "effects", columns, effects=[entry])
    return open_run(run.path)


@pytest.mark.parametrize(("rise", "expected"), [(0.0, HOLDS), (0.005, IN_PART), (0.02, FAILS)])
def test_silent_neurons_can_go_or_not(small: Run, rise: float, expected: str) -> None:
    run = studied(small, rise, condition="dead", kind="dead", silenced=900)
    answer = silent_can_go(run)
    assert answer.verdict == expected and "900 silent neurons" in answer.says and "other.txt" in answer.statistic
    row = findings(run).set_index("claim").loc["Neurons that never fired on one text can go on another."]
    assert row["verdict"] == expected and drawing(run, str(row.name))


@pytest.mark.parametrize(
    ("check", "about", "what"),
    [
        (
            silent_can_go,
            {"condition": "dead", "kind": "dead", "silenced": 1900},
            "without its 1,900 silent neurons the loss on other text changes",
        ),
        (
            half_can_go,
            {"condition": "smallest:0.5", "kind": "smallest", "share": 0.5},
            "with the smaller half of each layer's hidden values at 0 the loss changes",
        ),
    ],
)
def test_what_is_said_of_a_study(small: Run, check: Callable[[Run], Answer], about: dict[str, Any], what: str) -> None:
    run = studied(small, 0.0131, **about)
    sums, row = run.frame("effects")[["tokens", "base_sum", "loss_sum"]].sum(), effects(run).iloc[-1]
    change, rise = (sums["loss_sum"] - sums["base_sum"]) / sums["tokens"], sums["loss_sum"] / sums["base_sum"] - 1
    answer = check(run)
    assert answer.says == f"{what} by {change:+.4f} nats a token, {100 * rise:+.2f} %"
    assert (
        answer.statistic == f"{sums['tokens']:,.0f} tokens of 60 documents or blocks of long ones, paired, of other.txt"
    )
    assert row["low"] < change < row["high"] and answer.interval == between(row["low"], row["high"], " nats")


def test_silence_on_the_run_s_own_text_tells_nothing(small: Run) -> None:
    with pytest.raises(Missing, match=r"has no study of it: `twell ablate .* --condition dead --text OTHER`"):
        silent_can_go(small)
    for text in (OWN_TOKENS, str(small.manifest.text[0]["source"])):
        with pytest.raises(Missing, match="where they are silent"):
            silent_can_go(studied(small, 0.0, text, condition="dead", kind="dead", silenced=9))


@pytest.mark.parametrize(("rise", "expected"), [(0.003, HOLDS), (0.01, IN_PART), (0.02, FAILS)])
def test_half_of_the_values_can_go_or_not(small: Run, rise: float, expected: str) -> None:
    run = studied(small, rise, OWN_TOKENS, condition="smallest:0.5", kind="smallest", share=0.5)
    assert half_can_go(run).verdict == expected


def test_two_documents_are_no_interval(small: Run) -> None:
    run = studied(small, 0.0, documents=2, condition="smallest:0.5", kind="smallest", share=0.5)
    with pytest.raises(Missing, match="2 documents were read, and an interval takes three"):
        half_can_go(run)


@pytest.mark.parametrize(
    ("power", "noise", "expected"), [(1, 0, HOLDS), (1, 1, IN_PART), (0, 1, FAILS), (-1, 0, REVERSED)]
)
def test_importance_follows_activity_or_not(
    made: ModuleType, tmp_path: Any, power: int, noise: float, expected: str
) -> None:
    run = made.make(tmp_path / "run", sequences=12, parts=1)
    with pytest.raises(Missing, match="--neurons 64` estimates all of them"):
        activity_is_importance(run)
    counted = by_neuron(run).sort_values(["layer", "neuron"])
    rng = np.random.default_rng(2)
    size = np.maximum(counted["fires"], 0.5) ** float(power) * np.exp(noise * rng.normal(size=len(counted)))
    columns = {
        "layer": counted["layer"],
        "neuron": counted["neuron"],
        "estimate_sum": size * rng.choice([-1, 1], len(size)),
    }
    append(run.path, "neuron_effects", {**columns, "tokens": np.full(len(size), 500)})
    answer = activity_is_importance(open_run(run.path))
    assert answer.verdict == expected
    living = counted.assign(size=size)[counted["fires"] > 0]
    values = [stats.spearmanr(each["fires"], each["size"]).statistic for _, each in living.groupby("layer")]
    busiest = living.sort_values("fires", ascending=False, kind="stable").head(len(living) // 10)
    assert f"at Spearman {np.median(values):+.2f}, median of layers, where" in answer.says
    carried = 100 * busiest["size"].sum() / living["size"].sum()
    assert answer.says.endswith(f"the busiest tenth of the living neurons carries {carried:.0f} % of the effects")
    assert answer.statistic == f"{len(living):,} living neurons of 4 layers, effects to first order on 500 tokens"
    assert answer.interval.startswith(f"{min(values):+.2f} to {max(values):+.2f}, least and greatest layer")


def test_firings_that_push_the_loss_either_way_tell_no_importance(made: ModuleType, tmp_path: Any) -> None:
    """Sums of n random pushes have the size of √n: the busiest have the greatest, though none has an effect."""
    run = made.make(tmp_path / "run", sequences=12, parts=1)
    counted, rng = by_neuron(run), np.random.default_rng(3)
    fires = np.round(np.exp(rng.uniform(0, np.log(1e4), len(counted)))).astype(np.int64)
    rows = pd.DataFrame({"layer": counted["layer"], "fires": fires})

    def verdict(effect: np.ndarray) -> str:
        layers = [each for _, each in rows.assign(estimate=effect).groupby("layer")]
        values = [rank_correlation(each["fires"].to_numpy(), each["estimate"].abs().to_numpy()) for each in layers]
        assert min(values) > 0.7, "as high as a verdict asks for"
        return _verdict_on_importance(np.array(values), *np.transpose([_of_chance(each, 1.0) for each in layers]))

    pushes = rng.normal(size=len(fires)) * np.sqrt(fires)
    assert verdict(pushes) == UNTOLD
    assert verdict(pushes + fires) == HOLDS, "each firing costs as much, beside the pushes"
