"""Claims about training, from the logs of trainings. `findings` runs every check of CLAIMS.

A training is a run, whose table `training` is its log; of the bundled model the log ships beside its weights. To add a
claim, write its check here (`claim` says what it returns) and list it in CLAIMS at the end of this file.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pandas as pd

from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, LARGE, REVERSED, UNTOLD, Answer, Claim, between
from twell.analysis.speed.speedup import LEAST_BATCHES, blocks_error, geometric
from twell.analysis.statistics import t_half
from twell.analysis.training import training_phases, training_steps
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

BUNDLED = "demo-model"
COMMAND = "`twell train --config NAME --text CORPUS --out RUN` records how a model gets sparse"
SETTLED, NEARLY = 0.1, 0.25  # how far nnz at step 1 000 may be from the end's
STEP, ABOUT = 1000, 250  # and how far the log's nearest row may be from it
BLOCKS = 4  # of successive rows, whose means are nearly independent where the rows are not
STEP_RULE = "the interval lies above 1; below 0.985: reversed; below 1: does not hold; across 1: cannot be told"


def training_log(run: Run) -> pd.DataFrame:
    """Return columns step and nnz (mean over layers) of the training that made the run's model. Missing without one."""
    if run.has("training"):
        return training_steps(run)[["step", "nnz"]]
    if run.manifest.model["name"] == BUNDLED:
        return _bundled_log()
    raise Missing(f"Its model's training log is not at hand: {COMMAND}.")


def _bundled_log() -> pd.DataFrame:
    """Return columns step and nnz (mean over layers) of the bundled model's training."""
    log = pd.read_parquet(Path(str(resources.files("twell.data"))) / BUNDLED / "train-log.parquet")
    return pd.DataFrame({"step": log["step"], "nnz": log.filter(regex=r"^nnz_\d\d$").mean(axis=1)})


def settles(run: Run) -> Answer:
    """Check that mean nnz at step 1 000 is that of the end of the training."""
    return _settled(training_log(run))


def bundled_settles() -> Answer:
    """Check the same on the log of the bundled model's training, which ships with its weights."""
    answer = _settled(_bundled_log())
    return replace(answer, says=f"the bundled model's training: {answer.says}")


def _settled(log: pd.DataFrame) -> Answer:
    """Check it on a log, of columns step and nnz."""
    steps = log["step"].to_numpy()
    if steps[-1] < 2 * STEP:
        raise Missing(f"The training has {steps[-1]:,} steps: to settle within {STEP:,} it takes twice as many.")
    at = log.iloc[int(np.abs(steps - STEP).argmin())]
    if abs(at["step"] - STEP) > ABOUT:
        raise Missing(f"The log's row nearest to step {STEP:,} is of step {int(at['step']):,}: it takes one nearby.")
    after = log[(log["step"] >= STEP)]["nnz"]
    end = log[log["step"] >= 0.9 * steps[-1]]["nnz"].mean()
    off = abs(at["nnz"] / end - 1)
    return Answer(
        f"{at['nnz']:.1f} neurons a layer fire at step {int(at['step']):,}, then {after.min():.1f} to "
        f"{after.max():.1f}, and "
        f"{end:.1f} over the last tenth",
        f"mean over layers; {len(log)} rows of the log to step {steps[-1]:,}",
        HOLDS if off <= SETTLED else IN_PART if off <= NEARLY else FAILS,
        f"nnz at step {STEP:,} within {100 * SETTLED:g} % of that of the last tenth; within {100 * NEARLY:g} %: in "
        "part",
        "none: one training",
    )


def step_gains(run: Run) -> Answer:
    """Check that a training step of a large model runs faster with sparse kernels, at its end."""
    steps = training_steps(run) if run.has("training") else pd.DataFrame({"step_speedup": [], "nnz": []}, dtype=float)
    timed = steps["step_speedup"].dropna()
    if len(timed) < LEAST_BATCHES and (by_phase := _phase_gains(run)):
        return by_phase
    if timed.empty:
        raise Missing(
            f"It times no training step dense and sparse: {COMMAND}, and times both where sparse kernels pay."
        )
    parameters = run.manifest.model.get("parameters") or 0
    last = timed.tail(max(LEAST_BATCHES, len(timed) // 4)).to_numpy()
    ratio, low, high = geometric(last)
    if parameters < LARGE:
        raise Missing(
            f"The claim is of 0.5 B parameters and more; this one has {parameters:,}, and its step runs {ratio:.2f} "
            "times "
            "as fast."
        )
    return Answer(
        f"a training step runs {ratio:.2f} times as fast with sparse kernels as with dense ones",
        f"geometric mean of the last {len(last)} of {len(timed)} timings, at {steps['nnz'].iloc[-1]:.1f} neurons a "
        "layer",
        _step_verdict(low, high),
        STEP_RULE,
        between(low, high),
    )


def _step_verdict(low: float, high: float) -> str:
    """Return the verdict on the gain of a training step, by STEP_RULE."""
    return HOLDS if low > 1 else REVERSED if high < 0.985 else FAILS if high < 1 else UNTOLD


def _phase_gains(run: Run) -> Answer | None:
    """Return the answer of a training that began with dense kernels and went on with sparse ones, by its tokens a
    second; None for another, and for a small model."""
    if not run.has("training") or (run.manifest.model.get("parameters") or 0) < LARGE:
        return None
    dense, sparse = (np.log(phase["tokens_per_second"].to_numpy(float)) for phase in training_phases(run))
    if min(len(dense), len(sparse)) < LEAST_BATCHES:
        return None
    gain, error = sparse.mean() - dense.mean(), np.hypot(blocks_error(dense, BLOCKS), blocks_error(sparse, BLOCKS))
    half = float(t_half(min(len(dense), len(sparse), BLOCKS) - 1)) * error
    low, ratio, high = np.exp([gain - half, gain, gain + half])
    end = training_phases(run)[1].iloc[-1]
    return Answer(
        f"training runs {ratio:.2f} times as fast, {np.exp(sparse.mean()):,.0f} tokens a second, once "
        f"{int(end['sparse_layers'])} of {run.layers} layers run by sparse kernels, as by dense ones before",
        f"geometric means of {len(sparse)} rows of its log against {len(dense)}, interval by blocks of rows, at "
        f"{end['nnz']:.1f} neurons a layer",
        _step_verdict(low, high),
        STEP_RULE,
        between(low, high),
    )


CLAIMS = (
    Claim("training", "Sparsity settles within about 1 000 steps.", settles),
    Claim(
        "training",
        "A training step gains from -1.5 % at 0.5 B to 21.9 % at 2 B.",
        step_gains,
        "0.5 to 2 B parameters, their kernels, eight H100 PCIe, sequences of 2048",
    ),
)
