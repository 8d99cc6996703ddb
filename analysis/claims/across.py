"""Claims that compare models or trainings: checked over several runs, `findings(run, *others)`.

Each check takes all runs, the first among them, picks those that it can compare, and returns an Answer. It raises
Missing, with the command that would make what is missing. To add one, write it here and list it in CLAIMS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twell.analysis.activity.layers import by_layer
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, PAPER_SIZES, REVERSED, UNTOLD, Answer
from twell.analysis.training import training_steps
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

OWN = ("name", "seed", "minutes", "log_every", "evaluations")  # fields in which recipes may differ otherwise
FREE_L1, LITTLE_LOSS = 3e-5, 0.02  # L1 up to which the loss rises by less than 2 %
LEAST_SIZES = 3
LAST = 0.1  # share of the log that stands for its end
ONE_SEED = "none: one training of each"


@dataclass(frozen=True)
class RunsClaim:
    """A claim, its topic, the check that settles it on several runs, and what it was measured on."""

    topic: str
    text: str
    check: Callable[[Sequence[Run]], Answer]
    scope: str = PAPER_SIZES


@dataclass(frozen=True)
class Training:
    """How a training ended. recipe: its fields; loss: held out, nats; nnz: mean over layers; peak: bytes; speedup: of a
    step, NaN where it was not timed; sparse: whether any layer ran by sparse kernels."""

    name: str
    recipe: dict[str, Any]
    parameters: int
    loss: float
    nnz: float
    dead: float
    peak: float
    speedup: float
    sparse: bool


def trainings(runs: Sequence[Run]) -> list[Training]:
    """Return how each of the runs that are trainings ended."""
    found = []
    for run in runs:
        recipe = (run.manifest.training or {}).get("recipe")
        if recipe is None or not run.has("training"):
            continue
        steps = training_steps(run)
        end = steps[steps["step"] >= (1 - LAST) * steps["step"].max()]
        heldout = steps["heldout_loss"].dropna()
        loss = float(heldout.iloc[-1]) if len(heldout) else float(end["loss"].mean())
        found.append(
            Training(
                name=run.name,
                recipe=recipe,
                parameters=run.manifest.model.get("parameters") or 0,
                loss=loss,
                nnz=float(end["nnz"].mean()),
                dead=float(end["dead"].mean()),
                peak=float(steps["peak_bytes"].astype(float).max()),
                speedup=float(end["step_speedup"].mean()),
                sparse=bool((end["sparse_layers"].fillna(0) > 0).any()),
            )
        )
    return found


def alike(one: Training, other: Training, apart: Sequence[str]) -> bool:
    """Return whether two trainings have one recipe but for these fields."""
    names = (one.recipe.keys() | other.recipe.keys()) - {*OWN, *apart}
    return all(one.recipe.get(name) == other.recipe.get(name) for name in names)


def pair(runs: Sequence[Run], field: str, test: Callable[[Any], bool], command: str) -> tuple[Training, Training]:
    """Return two trainings of one recipe but for a field: one whose value meets the test, and one whose does not.
    Missing, with the command, where there is none."""
    all_trainings = trainings(runs)
    for one in all_trainings:
        for other in all_trainings:
            if test(one.recipe.get(field)) and not test(other.recipe.get(field)) and alike(one, other, (field,)):
                return one, other
    raise Missing(f"It takes two trainings of one recipe that differ in {field}: {command}.")


def scale(runs: Sequence[Run]) -> Answer:
    """Check that mean nnz falls from each size of model to the next."""
    sized = {
        run.manifest.model.get("parameters") or 0: run
        for run in runs
        if run.has("activity") or run.manifest.summary_only
    }
    sizes = {size: by_layer(run)["mean"].mean() for size, run in sorted(sized.items()) if size}
    if len(sizes) < LEAST_SIZES:
        raise Missing(
            f"It takes captures of {LEAST_SIZES} sizes of one recipe, got {len(sizes)}: `twell train --config "
            "paper-8x2048 --text CORPUS --out M`, the same with paper-18x2048 and paper-28x2048, then `twell capture` "
            "of each."
        )
    nnz = np.array(list(sizes.values()))
    falls, whole = (np.diff(nnz) < 0).all(), nnz[-1] < nnz[0]
    return Answer(
        ", ".join(f"{mean:.1f} at {size / 1e9:.2f} B" for size, mean in sizes.items()),
        f"mean nnz over layers of {len(sizes)} sizes",
        HOLDS if falls else IN_PART if whole else REVERSED if (np.diff(nnz) > 0).all() else FAILS,
        "it falls from each size to the next; from the least to the greatest alone: in part; rises each time: reversed",
        "none: one model of each size",
    )


def little_l1_is_free(runs: Sequence[Run]) -> Answer:
    """Check that an L1 up to 3e-5 raises the held-out loss by less than 2 %."""
    plain, others = None, []
    for one in trainings(runs):
        if one.recipe.get("l1") == 0:
            plain = one
        elif 0 < one.recipe.get("l1", 0) <= FREE_L1:
            others.append(one)
    others = [one for one in others if plain and alike(plain, one, ("l1", "l1_warmup"))]
    if plain is None or not others:
        raise Missing(
            "It takes trainings of one recipe with l1 = 0 and with l1 up to 3e-5: `twell train --config l1-0.toml "
            "--text "
            "CORPUS --out M` with a recipe for each."
        )
    rises = {one.recipe["l1"]: one.loss / plain.loss - 1 for one in others}
    most = max(rises.values())
    return Answer(
        ", ".join(f"L1 {l1:g}: loss {100 * rise:+.1f} %" for l1, rise in sorted(rises.items()))
        + "; downstream not measured",
        f"held-out loss {plain.loss:.3f} nats without L1",
        IN_PART if most < LITTLE_LOSS else FAILS,
        "the loss rises by less than 2 % at each; as nothing downstream is measured, that is in part",
        ONE_SEED,
    )


def gated_gains_more(runs: Sequence[Run]) -> Answer:
    """Check that a gated FFN gains more from sparsity than a plain one at the same L1."""
    gated, plain = pair(runs, "gated", bool, "`twell train` with gated = true and with gated = false in its recipe")
    if np.isnan(gated.speedup + plain.speedup):
        said = f"nnz {gated.nnz:.1f} gated, {plain.nnz:.1f} plain; no step was timed dense and sparse on a GPU"
        return Answer(said, "one training of each", UNTOLD, "the gated one's step gains more", ONE_SEED)
    return Answer(
        f"a step runs {gated.speedup:.2f} times as fast gated, {plain.speedup:.2f} times plain; nnz {gated.nnz:.1f} "
        "and "
        f"{plain.nnz:.1f}",
        "one training of each",
        HOLDS if gated.speedup > plain.speedup else REVERSED,
        "the gated one's step gains more",
        ONE_SEED,
    )


def relu_costs(runs: Sequence[Run]) -> Answer:
    """Compare the held-out losses of ReLU and SiLU: what is claimed is of downstream tasks, so no verdict follows."""
    silu, relu = pair(
        runs, "activation", lambda name: name == "silu", '`twell train` with activation = "silu" and "relu", l1 = 0'
    )
    return Answer(
        f"held-out loss {relu.loss:.3f} nats with ReLU, {silu.loss:.3f} with SiLU, "
        f"{100 * (relu.loss / silu.loss - 1):+.1f} %",
        "one training of each",
        UNTOLD,
        "the claim is of downstream tasks, which no run measures",
        ONE_SEED,
    )


def memory_falls(runs: Sequence[Run]) -> Answer:
    """Check that the peak memory of training falls by at least 19 % with sparse kernels."""
    all_trainings = [one for one in trainings(runs) if not np.isnan(one.peak)]
    for one in all_trainings:
        for other in all_trainings:
            if one.sparse and not other.sparse and alike(one, other, ()):
                saved = 1 - one.peak / other.peak
                return Answer(
                    f"{one.peak / 2**30:.2f} GiB with sparse kernels, {other.peak / 2**30:.2f} with dense ones, "
                    f"{100 * saved:.0f} % less",
                    "greatest memory in use over each training",
                    HOLDS if saved >= 0.19 else IN_PART if saved > 0 else REVERSED,
                    "at least 19 % less; less at all: in part; more: reversed",
                    ONE_SEED,
                )
    raise Missing(
        "It takes two trainings of one recipe on a GPU, one by sparse kernels: `twell train --kernel hopper …` and "
        "`twell train --kernel dense …`, or `twell bench --training`."
    )


def restarts_pay(runs: Sequence[Run]) -> Answer:
    """Check that starting dead neurons anew makes a step faster."""
    anew, plain = pair(runs, "restart_every", bool, "`twell train` with restart_every = 1000 and with 0 in its recipe")
    timed = not np.isnan(anew.speedup + plain.speedup)
    steps = f"; a step runs {anew.speedup:.2f} and {plain.speedup:.2f} times as fast" if timed else ""
    return Answer(
        f"{100 * anew.dead:.1f} % dead with restarts, {100 * plain.dead:.1f} % without; nnz {anew.nnz:.1f} and "
        f"{plain.nnz:.1f}{steps}",
        "one training of each",
        (HOLDS if anew.speedup > plain.speedup else FAILS) if timed else UNTOLD,
        "the step gains more with restarts",
        ONE_SEED,
    )


CLAIMS = (
    RunsClaim("scale", "Mean nnz falls with the model's size, from 39 at 0.5 B to 24 at 2 B.", scale),
    RunsClaim(
        "scale", "A gated FFN gains more than a plain one at the same L1: 17.9 % against 11.2 %.", gated_gains_more
    ),
    RunsClaim(
        "quality", "Up to an L1 of 3e-5, downstream scores stay and the loss rises by less than 2 %.", little_l1_is_free
    ),
    RunsClaim("quality", "ReLU costs 0.7 points downstream against SiLU: 46.4 against 47.1 %.", relu_costs),
    RunsClaim("training", "Peak training memory falls by 19 to 28 %, up to 1.5 B.", memory_falls),
    RunsClaim(
        "training", "Starting dead neurons anew in training adds a point of speed (19.1 against 17.9 %).", restarts_pay
    ),
)
