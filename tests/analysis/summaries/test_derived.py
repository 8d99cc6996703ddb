"""Moments and rank correlations of tables of a few rows, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from twell.analysis.summaries.derived import (
    ZScale,
    band_moments,
    count_classes,
    drawn_interval,
    group_degrees,
    moments,
    rank_correlations,
)


def test_moments_of_a_layer_are_over_its_unflagged_tokens() -> None:
    """Neither over the flagged ones nor over the rows of the sum over layers; a layer without tokens has none."""
    rows = {
        "layer": [-1, 0, 0, 0, 2],
        "flagged": np.array([False, False, False, True, False]),
        "nnz": [70, 1, 3, 900, 5],
        "tokens": [8, 2, 6, 40, 4],
    }
    mean, sd = moments(rows, 4)
    np.testing.assert_allclose(mean, [2.5, np.nan, 5, np.nan], rtol=1e-15)
    np.testing.assert_allclose(sd, [np.sqrt(0.75), np.nan, 0, np.nan], rtol=1e-15)


def test_moments_of_a_band_are_those_of_its_positions() -> None:
    """Positions 8 to 10 are one band, √(8 · 8) to √(8 · 11); where a band has no token, those of the layer stand in."""
    rows = {
        "layer": [-1, 0, 0, 0, 1, 1, 0],
        "flagged": np.array([False, False, False, False, False, True, False]),
        "position": [8, 8, 10, 11, 2, 2, 2],
        "tokens": [9, 2, 2, 1, 4, 9, 1],
        "nnz_sum": [900, 6, 10, 7, 20, 900, 3],
        "nnz_square": [90_000, 20, 52, 49, 148, 90_000, 9],
    }
    mean, sd = band_moments(rows, np.array([100.0, 200.0]), np.array([10.0, 20.0]))
    expected = np.tile([100.0, 200.0], (10, 1)), np.tile([10.0, 20.0], (10, 1))
    for (band, layer), at in {
        (8, 0): (4, np.sqrt(2)),
        (9, 0): (7, 0),
        (2, 1): (5, np.sqrt(12)),
        (2, 0): (3, 0),
    }.items():
        expected[0][band, layer], expected[1][band, layer] = at
    np.testing.assert_allclose(mean, expected[0], rtol=1e-15)
    np.testing.assert_allclose(sd, expected[1], rtol=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_correlation_of_classes_is_never_past_one(sign: int) -> None:
    """What classes lose is given back: of ranks that agree but for it, no more than all of it."""
    classes, replicate = np.tile([0, 1, 2], 3), np.repeat([0, 1, 2], 3)
    tokens = np.array([1, 2, 3, 2, 2, 2, 3, 2, 1])
    rows = {"layer": 0 * classes, "nnz_class": classes, "loss_class": classes[::sign], "replicate": replicate}
    estimate, without, kept = rank_correlations(rows | {"tokens": tokens}, np.array([4, 4, 4]))
    assert kept.item() < 0.95
    assert estimate.tolist() == [sign] and without.ravel().tolist() == [sign] * 3


def test_groups_of_documents_that_differ_in_size_count_as_fewer() -> None:
    rows = {"replicate": np.array([3, 3, 8, 8]), "tokens": np.array([1, 2, 4, 5])}
    assert group_degrees(rows) == pytest.approx(12**2 / (3**2 + 9**2) - 1, rel=1e-15)


def test_few_groups_have_students_interval_and_unequal_ones_none() -> None:
    """Seven groups are left out in turn, with the degrees of as many that differ in size; 0.9 degrees tell nothing.
    Eight are drawn from, and where one of them is far off, so is an end."""
    without = np.array([[1.0], [2.0], [4.0], [0.0], [3.0], [2.5], [1.5]])
    half = stats.t.ppf(0.975, 4.5) * np.sqrt(6 / 7 * ((without - 2) ** 2).sum())
    np.testing.assert_allclose(drawn_interval(np.array([2.0]), without, 4.5), [[2 - half], [2 + half]], rtol=1e-12)
    assert np.isnan(drawn_interval(np.array([2.0]), np.tile(without, (3, 1)), 0.9)).all()
    low, high = drawn_interval(np.array([2.0]), np.append(without, [[12.0]], axis=0), 7.0)
    assert abs(low + high - 4.0) > 1


def test_classes_of_counts_hold_all_counts_of_their_span() -> None:
    """Fine: the counts below 8 alone, then from k² / 8 on; else from (k / 8)⁴ on, as floor(8 · count^¼) is k."""
    counts = np.arange(2000)
    fine = np.bincount(np.where(counts < 8, counts, np.floor(np.sqrt(8 * counts))).astype(int))
    coarse = np.bincount(np.floor(8 * counts**0.25).astype(int))
    for highest in (0, 3, 9, 24, 40):
        np.testing.assert_array_equal(count_classes(highest, fine=True)[:highest], fine[:highest])
        np.testing.assert_array_equal(count_classes(highest, fine=False)[:highest], coarse[:highest])


def test_z_is_the_mean_over_the_layers_that_vary() -> None:
    """Of counts 3, 9 and 7: (3 - 1) / 2 and (7 - 3) / 4, of two layers; of no layer that varies, 0. The same in a
    band."""
    counts, mean = np.array([3.0, 9.0, 7.0]), np.array([1.0, 2.0, 3.0])
    for sd, z in (([2.0, 0.0, 4.0], 1.0), ([0.0, 0.0, 4.0], 1.0), ([0.5, 0.0, 4.0], 2.5), ([0.0, 0.0, 0.0], 0.0)):
        scale = ZScale.of((mean, np.array(sd)), (np.stack([mean, counts]), np.array([sd, sd])))
        assert counts @ scale.weight - scale.level == pytest.approx(z, abs=1e-15)
        np.testing.assert_allclose(scale.band_weight @ counts - scale.band_level, [z, 0], atol=1e-15)
