"""The estimators against scipy, brute force, and simulation with known truth."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, stats

from twell.analysis import statistics
from twell.analysis.statistics import (
    centred_error,
    distinct,
    effective,
    fisher_interval,
    grouped_median,
    grouped_spearman,
    jackknife_error,
    mean_error,
    mid_ranks,
    permutation_p,
    pooled_variance,
    quantiles,
    rank_share,
    ratio_error,
    shrink,
    student_p,
    t_half,
    welch_degrees,
)


def test_clustered_intervals_cover_the_truth() -> None:
    """400 repeats of 60 sequences with a correlation of 0.4 within; the naive interval must fail where ours holds."""
    rng = np.random.default_rng(1)
    covered = naive = 0
    repeats = 400
    for _ in range(repeats):
        sizes = rng.integers(1, 12, 60)
        mood = rng.normal(0, np.sqrt(0.4), 60)
        values = [5 + mood[g] + rng.normal(0, np.sqrt(0.6), n) for g, n in enumerate(sizes)]
        y, y2 = np.array([v.sum() for v in values]), np.concatenate(values)
        n = sizes.sum()
        error = ratio_error(n, (sizes**2).sum(), y.sum(), (y**2).sum(), (y * sizes).sum())
        covered += abs(y.sum() / n - 5) <= t_half(59) * error
        naive += abs(y2.mean() - 5) <= 1.96 * y2.std(ddof=1) / np.sqrt(n)
    assert covered / repeats >= 0.92
    assert naive / repeats < 0.85


def test_one_token_a_cluster_is_the_plain_error() -> None:
    values = np.random.default_rng(0).normal(3, 2, 50)
    assert mean_error(50, values.sum(), (values**2).sum()) == pytest.approx(stats.sem(values), rel=1e-12)


def test_equal_values_have_no_error() -> None:
    assert ratio_error(30, 100, 90, 900, 300) == 0


def test_two_clusters_have_an_error() -> None:
    """Residuals of 3 and -3 about a mean of 2, of clusters of one size, and of sizes 3 and 1: Kish's 2 and 1.6."""
    assert ratio_error(6, 18, 12, 90, 36) == pytest.approx(np.sqrt(2 * 18) / 6, rel=1e-15)
    assert ratio_error(4, 10, 8, 34, 14) == pytest.approx(np.sqrt(1.6 / 0.6 * 18) / 4, rel=1e-15)


def test_the_error_of_a_mean_less_that_of_all_values() -> None:
    """As above, of 10 values in all that add up to -2 and 2: residuals of 3 / 4 - 2 / 10 and of as much below 0."""
    expected = np.sqrt(1.6 / 0.6 * 2 * 0.55**2)
    assert centred_error((4, 10, 8, 34, 14), 4, -4, 8, 10) == pytest.approx(expected, rel=1e-12)
    assert np.isnan(centred_error((5, 25, 10, 100, 50), 20, 10, 8, 10)), "of one cluster, whose values add up to 2"


def test_a_variance_is_mixed_with_the_common_one_by_degrees_of_freedom() -> None:
    """Of ten and twenty values in 1.5 and 5 clusters: 5 and 4 a value, with 0.5 and 4 degrees; together 18.5 / 4.5."""
    variance, n, clusters = np.array([0.5, 0.2, np.nan, 0.1]), np.array([10, 20, 5, 8]), np.array([1.5, 5, 2, 1])
    pooled, degrees = pooled_variance(variance, n, clusters, np.zeros(4), 4)
    level = 18.5 / 4.5
    expected = [(2.5 + 4 * level) / 4.5 / 10, (16 + 4 * level) / 8 / 20, level / 5, level / 8]
    np.testing.assert_allclose(pooled, expected, rtol=1e-12)
    assert degrees.tolist() == [4.5, 8, 4, 4]
    for each in pooled_variance(variance[1:], n[1:], clusters[1:], np.zeros(3), 4):
        assert np.isnan(each).all(), "a single one tells none in common"


@pytest.mark.parametrize("fitted", [2048, 40])
def test_the_common_variance_of_many_means_follows_their_trend(monkeypatch: pytest.MonkeyPatch, fitted: int) -> None:
    """Against a minimiser of the same deviance; past so many, one in three is fitted."""
    monkeypatch.setattr(statistics, "FITTED", fitted)
    rng, size, prior = np.random.default_rng(8), 120, 6
    mean, n = rng.normal(size=size), rng.integers(20, 200, size)
    clusters = np.where(rng.random(size) < 0.1, 1, rng.uniform(2, 15, size))
    trend = np.exp(0.3 + 0.5 * mean + 0.4 * np.log(n / clusters))
    own = np.where(clusters > 1, trend * rng.chisquare(4, size) / 4, 0)
    told = np.flatnonzero(clusters > 1)
    told = told[:: 3 if fitted < size else 1]
    middle = np.clip(mean, *np.quantile(mean[told], [0.01, 0.99]))
    design, weight = np.stack([np.ones(size), middle, np.log(n / clusters)]), np.maximum(clusters - 1, 0)

    def deviance(beta: np.ndarray) -> float:
        log_fit = beta @ design[:, told]
        return float((weight[told] * (own[told] * np.exp(-log_fit) + log_fit)).sum())

    common = np.exp(optimize.minimize(deviance, np.zeros(3), method="BFGS", tol=1e-9).x @ design)
    pooled, degrees = pooled_variance(own / n, n, clusters, mean, prior)
    np.testing.assert_allclose(pooled, (own * weight + common * prior) / (weight + prior) / n, rtol=1e-5)
    np.testing.assert_allclose(degrees, weight + prior, rtol=1e-15)


def test_degrees_of_a_difference() -> None:
    """By Welch and Satterthwaite (9 + 16)² / (9² / 9 + 16² / 16); without any error the least of both."""
    np.testing.assert_allclose(welch_degrees([[3, 0], [4, 0]], [[9, 5], [16, 7]]), [25, 5], rtol=1e-15)


def test_too_few_clusters() -> None:
    assert np.isnan(ratio_error(5, 25, 10, 100, 50))
    assert np.isnan(jackknife_error(1.0, [1.0]))
    assert np.isnan(t_half([0, 0.9])).all()


def test_effective_number_of_clusters() -> None:
    """All of them where they are of one size, else fewer; where one holds nearly all tokens, nothing can be said."""
    assert effective(30, 90) == 10
    assert effective(1009, 1000**2 + 9) == pytest.approx(1.018, abs=1e-3)
    assert np.isnan(t_half(effective(1009, 1000**2 + 9) - 1))


def test_t() -> None:
    np.testing.assert_allclose(t_half([1, 7, 1e9, np.inf]), stats.t.ppf(0.975, [1, 7, 1e9, np.inf]), rtol=1e-9)


@pytest.mark.parametrize("shares", [[0.0, 0.1, 0.5, 0.9, 0.99, 1.0]])
@pytest.mark.parametrize("n", [1, 2, 10, 100, 997])
def test_quantiles(shares: list[float], n: int) -> None:
    data = np.random.default_rng(n).poisson(4, n)
    values, counts = np.unique(data, return_counts=True)
    exact = np.quantile(data, shares, method="inverted_cdf")
    assert quantiles(values, counts, shares).tolist() == exact.tolist()


def test_spearman_of_counts() -> None:
    """Against scipy on the pairs themselves, all of them and without each group, counted at once or by ones."""
    rng = np.random.default_rng(2)
    a, group = rng.integers(0, 6, 500), rng.integers(0, 4, 500)
    b = np.minimum(a + rng.integers(0, 5, 500), 8)
    estimate, without = grouped_spearman(a, b, group, np.ones(500, int))
    assert estimate == pytest.approx(stats.spearmanr(a, b).statistic, rel=1e-12)
    expected = [stats.spearmanr(a[group != left], b[group != left]).statistic for left in range(4)]
    np.testing.assert_allclose(without, expected, rtol=1e-12)
    entries, count = np.unique(np.stack([a, b, group]), axis=1, return_counts=True)
    again, less = grouped_spearman(*entries, count)
    assert (again, less.tolist()) == (pytest.approx(estimate), pytest.approx(without.tolist()))


def test_spearman_of_one_class_is_empty() -> None:
    estimate, without = grouped_spearman(*np.array([[0, 0, 0], [0, 1, 2], [0, 1, 1], [3, 4, 5]]))
    assert np.isnan(estimate) and np.isnan(without).all()
    estimate, without = grouped_spearman(*np.array([[0, 1, 1], [0, 1, 1], [0, 1, 2], [3, 4, 5]]))
    assert estimate == pytest.approx(1) and np.isnan(without).tolist() == [True, False, False], "all of one class left"


def test_median_of_groups() -> None:
    rng = np.random.default_rng(4)
    group = np.concatenate([rng.integers(0, 7, 60), [8, 8, 9]])
    values = np.concatenate([np.where(rng.random(60) < 0.2, np.nan, rng.normal(size=60)), [np.nan, np.nan, 3.0]])
    expected = pd.Series(values).groupby(group).median().reindex(range(10))
    np.testing.assert_array_equal(grouped_median(values, group), expected)
    np.testing.assert_array_equal(grouped_median(np.array([1.0, 3.0, 20.0]), np.array([0, 0, 2])), [2, np.nan, 20])


def test_ranks_with_ties() -> None:
    values = np.random.default_rng(5).integers(0, 9, 40) / 4
    np.testing.assert_array_equal(mid_ranks(values), stats.rankdata(values))


def test_the_share_of_ranks_that_classes_keep() -> None:
    """Of six values of two tokens each, in classes of two, three and one: variances of scipy's ranks."""
    value = np.repeat(np.arange(6), 2)
    classes = np.array([0, 0, 1, 1, 1, 2])[value]
    kept = np.var(stats.rankdata(classes)) / np.var(stats.rankdata(value))
    assert rank_share(np.array([4, 6, 2]), [2, 3, 1]) == pytest.approx(kept, rel=1e-12)
    assert rank_share(np.array([4, 6, 2]), [1, 1, 1]) == rank_share(np.array([9]), [5]) == 1, (
        "nothing to keep or to lose"
    )


@pytest.mark.parametrize("n", [3, 5, 8])
def test_exact_permutations(n: int) -> None:
    rng = np.random.default_rng(n)
    x, y = rng.normal(size=n), rng.normal(size=n)
    observed = abs(np.corrcoef(x, y)[0, 1])
    every = [abs(np.corrcoef(x, y[list(order)])[0, 1]) for order in permutations(range(n))]
    assert permutation_p(x, y) == pytest.approx(np.mean(np.array(every) >= observed - 1e-12), rel=1e-12)


def test_exact_permutations_of_nine_are_split_rightly() -> None:
    x = np.arange(9.0)
    assert permutation_p(x, x) == pytest.approx(2 / 362880, rel=1e-12)


def test_student_p() -> None:
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=15), rng.normal(size=15)
    expected = stats.pearsonr(x, y)
    assert student_p(expected.statistic, 15) == pytest.approx(expected.pvalue, rel=1e-9)
    assert student_p(1.0, 15) == 0


def test_fisher() -> None:
    rng = np.random.default_rng(6)
    x = rng.normal(size=20)
    result = stats.pearsonr(x, x + rng.normal(size=20))
    low, high = fisher_interval(result.statistic, 1 / np.sqrt(17), np.inf)
    expected = result.confidence_interval(0.95)
    assert (float(low), float(high)) == pytest.approx((expected.low, expected.high), rel=1e-9)


def test_shrink_against_a_root_finder() -> None:
    from scipy.optimize import brentq

    rng = np.random.default_rng(3)
    error = rng.uniform(0.1, 1.0, 80)
    mean = rng.normal(0.4, 0.5, 80) + rng.normal(0, error)

    def centre(between: float) -> float:
        return float(np.average(mean, weights=1 / (error**2 + between)))

    between = brentq(lambda t: ((mean - centre(t)) ** 2 / (error**2 + t)).sum() - 79, 1e-9, 10)
    kept = between / (between + error**2)
    for unit in (1, 1000):  # whatever the unit that means are told in
        shrunk, spread = shrink(unit * mean, unit * error)
        np.testing.assert_allclose(shrunk / unit, kept * mean + (1 - kept) * centre(between), rtol=1e-6)
        np.testing.assert_allclose(spread / unit, error * np.sqrt(kept), rtol=1e-6)


def test_shrunk_means_are_nearer_the_truth_and_their_intervals_hold_it() -> None:
    rng = np.random.default_rng(4)
    inside, better = [], 0
    for _ in range(50):
        truth, error = rng.normal(0, 0.5, 200), rng.uniform(0.1, 1.5, 200)
        seen = truth + rng.normal(0, error)
        shrunk, spread = shrink(seen, error)
        inside.append(np.mean(np.abs(shrunk - truth) < 1.96 * spread))
        better += np.mean((shrunk - truth) ** 2) < 0.6 * np.mean((seen - truth) ** 2)
    assert 0.93 < np.mean(inside) < 0.97
    assert better == 50


def test_shrink_means_that_differ_by_chance_alone() -> None:
    shrunk, spread = shrink(np.array([1.0, 1.01, 0.99]), np.full(3, 0.5))
    np.testing.assert_allclose(shrunk, 1.0, atol=1e-6)
    assert (spread < 1e-3).all()


def test_distinct_numbers() -> None:
    numbers = np.array([7, 0, 7, 3, 3, 0, 19], np.int32)
    for each in (numbers, numbers * 2**20):  # large ones are sorted, small ones counted
        distinct_values, place = distinct(each)
        expected, inverse = np.unique(each, return_inverse=True)
        assert distinct_values.tolist() == expected.tolist()
        assert place.tolist() == inverse.tolist()
    assert [len(values) for values in distinct(numbers[:0])] == [0, 0]


def test_a_jackknife_counts_the_groups_that_have_a_say() -> None:
    """A place that two groups of twenty reach has the error of a mean of two, of which the others know nothing."""
    rng = np.random.default_rng(7)
    for reached in (2, 3, 20):
        n = np.zeros(20)
        n[:reached] = 50
        y = n * rng.normal(size=20)
        with np.errstate(invalid="ignore"):
            error = jackknife_error(y.sum() / n.sum(), (y.sum() - y) / (n.sum() - n))
        means = y[:reached] / 50
        assert error == pytest.approx(means.std(ddof=1) / np.sqrt(reached))
    assert np.isnan(jackknife_error(1.0, [2.0])) and jackknife_error(1.0, [1.0, 1.0]) == 0
