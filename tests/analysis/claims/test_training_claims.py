"""Claims on training, told by the recorded training that went from dense kernels to sparse ones."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.signal import lfilter

from twell.analysis import findings
from twell.analysis.claims import training
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, REVERSED, UNTOLD, between
from twell.analysis.claims.training import _settled, bundled_settles, step_gains
from twell.analysis.shipped import recorded_trainings
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


@pytest.fixture(scope="module")
def log() -> pd.DataFrame:
    """The recorded log, read without the package."""
    (run,) = recorded_trainings()
    return pd.concat(map(pd.read_parquet, sorted((run.path / "training").iterdir())), ignore_index=True)


def row(table: pd.DataFrame, beginning: str) -> pd.Series:
    return table[table["claim"].str.startswith(beginning)].iloc[0]


def test_a_training_beside_a_capture_answers_for_it(run: Run, log: pd.DataFrame) -> None:
    """It is named, with its own scope; alone, the capture cannot tell."""
    beginning = "A training step gains"
    assert row(findings(run), beginning)["verdict"] == UNTOLD
    (other,) = recorded_trainings()
    table = findings(run, other)
    answer = row(table, beginning)
    dense, sparse = log[log["sparse_layers"] == 0].iloc[1:], log[log["sparse_layers"] == 27]
    ratio = np.exp(np.log(sparse["tokens_per_second"]).mean() - np.log(dense["tokens_per_second"]).mean())
    assert answer["this_run"].startswith(f"training runs {ratio:.2f} times")
    assert answer["scope"].startswith("h200-28x2048-training, ")
    low, high = map(float, answer["interval"].split(" to "))
    assert 1 < low < ratio < high < 2
    assert (answer["verdict"], "1,472,317,440 parameters" in answer["scope"]) == (HOLDS, True)
    memory = row(table, "Peak training memory")
    saved = 1 - sparse["peak_bytes"].max() / dense["peak_bytes"].max()
    assert (memory["verdict"], f"{100 * saved:.0f} % less" in memory["this_run"]) == (HOLDS, True)
    assert row(table, "Sparsity settles")["verdict"] == UNTOLD  # 319 steps


def test_the_bundled_log_tells_whether_sparsity_settles() -> None:
    answer = bundled_settles()
    at, *_, end = map(float, re.findall(r"\d+\.\d+", answer.says))
    assert (answer.verdict == HOLDS) == (abs(at / end - 1) <= 0.1)


@pytest.mark.parametrize("steps", [(1, 5000, 10_000), (10_000, 20_000, 100_000)])
def test_a_log_without_a_row_near_step_1000_tells_nothing_of_it(steps: tuple[int, ...]) -> None:
    with pytest.raises(Missing, match=f"is of step {steps[0]:,}"):
        _settled(pd.DataFrame({"step": steps, "nnz": [400.0, 40.0, 40.0]}))
    assert _settled(pd.DataFrame({"step": [1, 900, 10_000], "nnz": [400.0, 40.0, 40.0]})).verdict == HOLDS


def test_what_is_said_of_settling() -> None:
    """The last tenth begins at step 9 000: 40 neurons a layer; at step 1 000, so many times that."""
    for ratio, verdict in ((1.09, HOLDS), (0.91, HOLDS), (1.2, IN_PART), (0.8, IN_PART), (1.3, FAILS), (0.7, FAILS)):
        log = pd.DataFrame({"step": [1, 1000, 5000, 9000, 10_000], "nnz": [400, 40 * ratio, 60, 41, 39]})
        answer = _settled(log)
        assert answer.verdict == verdict
        at = 40 * ratio
        span = f"then {min(at, 39):.1f} to 60.0, and 40.0 over the last tenth"
        assert answer.says == f"{at:.1f} neurons a layer fire at step 1,000, {span}"
        assert answer.statistic == "mean over layers; 5 rows of the log to step 10,000"


@pytest.mark.parametrize(("gain", "verdict"), [(1.1, HOLDS), (1.0, UNTOLD), (0.99, FAILS), (0.95, REVERSED)])
def test_the_gain_of_a_step_is_that_of_the_last_quarter_of_its_timings(
    monkeypatch: pytest.MonkeyPatch, gain: float, verdict: str
) -> None:
    """Of twenty timings in forty rows the last five, less or more by up to 0.3 %."""
    (run,) = recorded_trainings()
    last = gain * np.array([0.998, 1.003, 1.0, 0.999, 1.0])
    steps = pd.DataFrame({"step_speedup": [np.nan, 0.5] * 20, "nnz": np.linspace(400, 31, 40)})
    steps.loc[steps.index[31::2], "step_speedup"] = last
    monkeypatch.setattr(training, "training_steps", lambda _: steps)
    answer, logs = step_gains(run), np.log(last)
    half = stats.t.ppf(0.975, 4) * logs.std(ddof=1) / np.sqrt(5)
    assert answer.verdict == verdict
    ratio = np.exp(logs.mean())
    assert answer.says == f"a training step runs {ratio:.2f} times as fast with sparse kernels as with dense ones"
    assert answer.statistic == "geometric mean of the last 5 of 20 timings, at 31.0 neurons a layer"
    assert answer.interval == between(*np.exp([logs.mean() - half, logs.mean() + half]))
    run.manifest.model["parameters"] = int(3e8)
    with pytest.raises(Missing, match=f"this one has 300,000,000, and its step runs {ratio:.2f} times as fast"):
        step_gains(run)


def test_the_interval_of_a_training_allows_for_rows_that_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of logs whose neighbouring rows correlate at 0.6 and which gain nothing, nearly 95 % of intervals hold 1."""
    (run,) = recorded_trainings()
    rng, held = np.random.default_rng(3), 0
    for _ in range(200):
        logs = []
        for length in (20, 60):
            noise = rng.normal(0, 0.8, length)
            noise[0] /= 0.8
            logs.append(np.exp(10 + 0.05 * lfilter([1], [1, -0.6], noise)))
        phases = [pd.DataFrame({"tokens_per_second": each, "sparse_layers": 27, "nnz": 30.0}) for each in logs]
        monkeypatch.setattr(training, "training_phases", lambda _, phases=phases: phases)
        answer = training._phase_gains(run)
        assert answer is not None
        low, high = map(float, answer.interval.split(" to "))
        held += low <= 1 <= high
    assert held > 0.9 * 200
