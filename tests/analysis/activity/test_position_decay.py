"""Decays that were planted, found again; the fit against scipy's; verdicts that could be others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from scipy.optimize import curve_fit

from twell.analysis import position_fit
from twell.analysis.activity.position_decay import LITTLE
from twell.analysis.claims.activity import falls_exponentially
from twell.analysis.claims.claim import FAILS, UNTOLD
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

A, B, DECAY = 30.0, 60.0, 12.0

Mean = Callable[[np.ndarray], np.ndarray]


def planted(made: ModuleType, path: Path, mean: Mean, seed: int = 0, sequences: int = 60) -> Run:
    """A run whose nnz has this mean at a position, times a factor that a sequence shares: correlation about 0.5."""

    def change(columns: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        mood = rng.gamma(9, 1 / 9, columns["sequence"].max() + 1)[columns["sequence"]]
        for name in ("nnz_00", "nnz_01"):
            columns[name] = rng.poisson(mood * mean(columns["position"])).astype(np.uint16)
        return columns

    shape = made.Shape(
        layers=2, sequences=sequences, length=160, parts=1, neurons=False, tiles=False, timings=0, seed=seed
    )
    return made.make(path, shape, change=change)


def falling(position: np.ndarray) -> np.ndarray:
    return A + B * np.exp(-position / DECAY)


def test_a_planted_decay_is_found(made: ModuleType, tmp_path: Path) -> None:
    table = position_fit(planted(made, tmp_path / "planted", falling))
    assert list(table["layer"]) == [0, 1, -1]
    assert (table["verdict"] == "exponential").all()
    assert (table["decay_low"] < DECAY).all()
    assert (table["decay_high"] > DECAY).all()
    assert (table["decay_high"] - table["decay_low"] < 5).all()
    assert (table["r2"] > 0.95).all()
    np.testing.assert_allclose(table["a"], [A, A, 2 * A], rtol=0.15)
    np.testing.assert_allclose(table["b"], [B, B, 2 * B], rtol=0.2)


def test_the_fit_is_that_of_scipy(run: Run) -> None:
    rows = run.frame("activity")
    rows = rows[(rows["flags"] == 0) & (rows["position"] > 0)]
    position, nnz = rows["position"].to_numpy(float), rows["nnz_02"].to_numpy(float)
    band = np.where(position < 8, position, np.floor(np.sqrt(8 * position))).astype(int)
    numbers, place, tokens = np.unique(band, return_inverse=True, return_counts=True)
    x, y = (np.bincount(place, values) / tokens for values in (position, nnz))
    variance = np.bincount(place, nnz**2) / tokens - y**2

    def fit(curve: Callable[..., np.ndarray], start: tuple[float, ...]) -> tuple[np.ndarray, float]:
        parameters, _ = curve_fit(curve, x, y, p0=start, sigma=np.sqrt(variance / tokens), maxfev=20_000)
        return parameters, float(((y - curve(x, *parameters)) ** 2 * tokens / variance).sum())

    (a, b, decay), left = fit(lambda p, a, b, decay: a + b * np.exp(-p / decay), (10, 10, 5))
    (_, _, power), power_left = fit(lambda p, a, b, k: a + b * p**-k, (10, 10, 1))
    row = position_fit(run).iloc[2]
    assert (row["a"], row["b"], row["decay"]) == pytest.approx((a, b, decay), rel=1e-3)
    assert row["power"] == pytest.approx(power, rel=1e-3)
    assert row["aicc"] == pytest.approx(len(numbers) * np.log(left / power_left), rel=1e-3)
    weight = tokens / variance
    assert row["r2"] == pytest.approx(1 - left / (weight * (y - np.average(y, weights=weight)) ** 2).sum(), rel=1e-6)
    assert (row["bands"], row["tokens"]) == (len(numbers), len(rows))
    start = run.frame("activity").query("position == 0 and flags < 4")["nnz_02"].mean()
    assert row["first_ratio"] == pytest.approx(start / row["a"], rel=1e-9)


@pytest.mark.parametrize(
    ("mean", "verdict"),
    [
        (lambda p: 20 + 80 / np.maximum(p, 0.5), "power law"),
        (lambda p: 30 + 0 * p, "no decay"),
        (lambda p: 30 + 0.1 * p, "rises"),
    ],
    ids=["power law", "level", "rising"],
)
def test_verdicts(made: ModuleType, tmp_path: Path, mean: Mean, verdict: str) -> None:
    assert set(position_fit(planted(made, tmp_path / "other", mean))["verdict"]) == {verdict}


def test_a_wide_interval_around_0_is_no_evidence_of_no_decay(made: ModuleType, tmp_path: Path) -> None:
    """Few sequences leave a drop of 10 % of what fires later possible; many rule it out, on the same counts."""
    for sequences, verdict, settled in ((12, "cannot be told", UNTOLD), (60, "no decay", FAILS)):
        run = planted(made, tmp_path / verdict, lambda p: 30 + 0 * p, sequences=sequences)
        row = position_fit(run).iloc[-1]
        assert row["drop_low"] < 0 < row["drop_high"]
        rows = run.frame("activity").query("position > 80")
        late = (rows["nnz_00"] + rows["nnz_01"]).mean()
        assert (row["drop_high"] < LITTLE * late) == (verdict == "no decay")
        assert (row["verdict"], falls_exponentially(run).verdict) == (verdict, settled)


def test_two_exponentials_are_no_power_law(made: ModuleType, tmp_path: Path) -> None:
    def two(position: np.ndarray) -> np.ndarray:
        return 20 + 90 * np.exp(-position / 2) + 50 * np.exp(-position / 40)

    assert set(position_fit(planted(made, tmp_path / "two", two))["verdict"]) <= {"two exponentials", "either"}


def test_a_straight_fall_has_no_length(made: ModuleType, tmp_path: Path) -> None:
    table = position_fit(planted(made, tmp_path / "straight", lambda p: 60 - 0.25 * p))
    assert set(table["verdict"]) == {"cannot be told"}
    assert np.isinf(table["decay_high"]).all()


@pytest.mark.parametrize("length", [9, 12, 14])
def test_no_position_is_early_and_late(made: ModuleType, tmp_path: Path, length: int) -> None:
    """Of sequences whose middle lies before position 8, the two halves are compared."""

    def change(columns: dict[str, Any]) -> dict[str, Any]:
        fires = np.where(columns["position"] <= columns["position"].max() / 2, 50, 30).astype(np.uint16)
        return {**columns, "nnz_00": fires, "nnz_01": fires}

    row = position_fit(made.make(tmp_path / "made", layers=2, sequences=200, length=length, change=change)).iloc[0]
    assert row[["drop", "drop_low", "drop_high"]].tolist() == pytest.approx([20, 20, 20])


def test_short_sequences(made: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="sequences of 9 tokens or more"):
        position_fit(made.make(tmp_path / "short", length=5, sequences=20, parts=1))
