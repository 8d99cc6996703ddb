"""What is said of any of several layers or tokens is hardly ever said by chance, and is said where it is so."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from twell.analysis.claims import tokens
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, REVERSED, UNTOLD
from twell.analysis.claims.speed import _verdict_slower
from twell.analysis.claims.tokens import _verdict_within
from twell.analysis.comparisons import difference_p, q_values, widened
from twell.analysis.speed.speedup import geometric
from twell.analysis.statistics import fisher_interval, t_half
from twell.workbench.run.store import Run

GROUPS, REPEATS = 20, 300


def test_widened_is_bonferronis() -> None:
    degrees = [1, 1.5, 4, 19]
    expected = stats.t.ppf(1 - 0.025 / 28, degrees) / stats.t.ppf(0.975, degrees)
    np.testing.assert_allclose(widened(degrees, 28), expected, rtol=1e-9)
    assert widened(19.0, 1) == 1
    assert np.isnan(widened(0.5, 3))


def test_q_values_are_those_of_scipy() -> None:
    p = np.random.default_rng(1).uniform(size=40) ** 3
    np.testing.assert_allclose(q_values(p), stats.false_discovery_control(p), rtol=1e-12)
    gaps = np.insert(p, [0, 7, 40], np.nan)
    np.testing.assert_array_equal(q_values(gaps)[~np.isnan(gaps)], q_values(p))
    assert np.isnan(q_values(gaps)[np.isnan(gaps)]).all()
    assert len(q_values([])) == 0


def test_p_agrees_with_the_interval() -> None:
    degrees = np.array([1.0, 5.5, 40.0])
    np.testing.assert_allclose(difference_p(-2 * t_half(degrees), np.full(3, 2.0), degrees), 0.05, rtol=1e-9)
    told = difference_p([0.0, 1.0, 1.0, 1.0], [0.0, 0.0, np.nan, 1.0], [9.0, 9.0, 9.0, 0.5])
    np.testing.assert_array_equal(told, [1.0, 0.0, np.nan, np.nan])


def within(rng: np.random.Generator, layers: int, planted: float = 0.0) -> pd.DataFrame:
    """Rows of `surprisal_within` for correlations that are 0 in each layer, but planted in the first."""
    error = 0.02
    z = rng.normal(0, error, layers) + planted * (np.arange(layers) == 0)
    measured = error * np.sqrt(rng.chisquare(GROUPS - 1, layers) / (GROUPS - 1))
    low, high = fisher_interval(np.tanh(z), measured, GROUPS - 1)
    rows = pd.DataFrame({"pearson": np.tanh(z), "low": low, "high": high})
    rows.attrs["degrees"] = float(GROUPS - 1)
    return rows


@pytest.mark.parametrize("layers", [8, 28])
def test_a_loss_that_no_layer_follows_is_hardly_ever_followed_in_part(layers: int) -> None:
    """By each layer's own interval it is in 18 and 50 % of runs."""
    rng = np.random.default_rng(layers)
    verdicts = [_verdict_within(within(rng, layers)) for _ in range(REPEATS)]
    assert np.mean([verdict != UNTOLD for verdict in verdicts]) < 0.05
    planted = [_verdict_within(within(rng, layers, planted=0.12)) for _ in range(REPEATS)]
    assert np.mean([verdict == IN_PART for verdict in planted]) > 0.9


def test_most_layers_decide() -> None:
    rng = np.random.default_rng(3)
    rows = pd.concat([within(rng, 1, planted=0.2) for _ in range(8)])
    assert _verdict_within(rows) == HOLDS
    turned = rows.assign(pearson=-rows["pearson"], low=-rows["high"], high=-rows["low"])
    assert _verdict_within(turned) == REVERSED


def test_tokens_that_fire_as_all_do_are_hardly_ever_quiet_in_part(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four, by each token's own interval one is in some 10 % of runs."""
    rng, names, size = np.random.default_rng(9), ["doesn", "couldn", "doi", "gov"], 4

    def verdict(means: list[float]) -> str:
        errors = 0.1 * np.sqrt(rng.chisquare(30, size) / 30)
        columns = {"text": names, "count": 99, "sequences": 50, "degrees": 30.0, "z_se": errors}
        rows = pd.DataFrame({**columns, "z": rng.normal(means, 0.1)})
        monkeypatch.setattr(tokens, "tokens_spelt", lambda *_: rows)
        return tokens.named_tokens(names, -1)(run).verdict

    told = [verdict([0.0] * size) for _ in range(2 * REPEATS)]
    assert np.mean([each == IN_PART for each in told]) < 0.045
    assert (verdict([-1.0, 0.0, 0.0, 0.0]), verdict([1.0, 0.0, 0.0, 0.0])) == (IN_PART, FAILS)


def test_layers_as_fast_as_dense_are_hardly_ever_slower_in_part() -> None:
    """Of 20 layers timed in five batches; by each layer's own interval some are slower, or faster, in 60 % of runs."""
    rng, degrees = np.random.default_rng(5), np.full(20, 4)

    def verdict(means: np.ndarray) -> str:
        return _verdict_slower(np.array([geometric(np.exp(rng.normal(m, 0.05, 5))) for m in means]), degrees)

    told = [verdict(np.zeros(20)) for _ in range(REPEATS)]
    assert np.mean([each != UNTOLD for each in told]) < 0.08
    one = np.where(np.arange(20) == 7, 1.0, 0.0)
    assert (verdict(-np.ones(20)), verdict(np.ones(20))) == (HOLDS, REVERSED)
    assert (verdict(-one), verdict(one)) == (IN_PART, FAILS)
