"""Claims that compare models or trainings: checked over several runs, `findings([run, other, …])`.

Each check takes all runs, the first among them, picks those that it can compare, and returns an Answer that names
them. Trainings are compared by pairs (`pairs`). It raises Missing, with the command that would make what is missing. To
add one, write it here and list it in CLAIMS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twell.analysis.activity.layers import by_layer
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, PAPER_SIZES, REVERSED, UNTOLD, Answer
from twell.analysis.claims.pairs import (
    TrainingPair,
    graded,
    listed,
    loss_of,
    members,
    named,
    of_seeds,
    pairs,
    ruled,
    sized,
    timed,
)
from twell.analysis.training import EQUAL, TrainingOutcome, training_outcomes, training_phases
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

FREE_L1, LITTLE_LOSS = 3e-5, 0.02  # L1 up to which the loss rises by less than 2 %
LEAST_SIZES = 3
SIZE = ("layers", "tokens", "steps")  # fields in which a series over depth differs; one over width has its own
WIDTH = ("d_model", "d_ff", "kv_heads", "tokens", "steps")


@dataclass(frozen=True)
class RunsClaim:
    """A claim, its topic, the check that settles it on several runs, and what it was measured on."""

    topic: str
    text: str
    check: Callable[[Sequence[Run]], Answer]
    scope: str = PAPER_SIZES


def scale(runs: Sequence[Run]) -> Answer:
    """Check that mean nnz falls from each size of model to the next: over depth, as the claim has it, or else width."""
    depth, width = (series(training_outcomes(runs), apart) for apart in (SIZE, WIDTH))
    if len(depth) >= LEAST_SIZES or len(width) >= LEAST_SIZES:
        chosen, other = (depth, width) if len(depth) >= LEAST_SIZES else (width, [])
        says = f"over depth {_sizes(chosen)}" if chosen is depth else f"over width {_sizes(chosen)}"
        says += f"; over width {_sizes(other)}" if len(other) >= LEAST_SIZES else ""
        nnz, about = np.array([one.nnz for one in chosen]), f"one recipe, {sized(chosen)}"
        names = tuple(one.name for one in chosen)
    else:
        captured = _captures(runs)
        means = {size: by_layer(run)["mean"].mean() for size, run in sorted(captured.items())}
        if len(means) < LEAST_SIZES:
            raise Missing(
                f"It takes trainings of {LEAST_SIZES} sizes of one recipe whose L1 had risen in full, got "
                f"{max(len(depth), len(width))}, or captures of one text of as many sizes, got {len(means)}: `twell "
                "train --config paper-8x2048 --text CORPUS --out M`, the same with paper-18x2048 and paper-28x2048, "
                "then `twell capture` of each."
            )
        says = ", ".join(f"{mean:.1f} at {size / 1e9:.2f} B" for size, mean in means.items())
        nnz, about = np.array(list(means.values())), f"{len(means)} captures of one text, the first of each size"
        names = tuple(captured[size].name for size in means)
    falls, whole = (np.diff(nnz) < 0).all(), nnz[-1] < nnz[0]
    return Answer(
        says,
        f"mean nnz over layers of {len(nnz)} sizes; {about}",
        HOLDS if falls else IN_PART if whole else REVERSED if (np.diff(nnz) > 0).all() else FAILS,
        "it falls from each size to the next; from the least to the greatest alone: in part; rises each time: reversed",
        "none: one model of each size",
        names,
    )


def _captures(runs: Sequence[Run]) -> dict[int, Run]:
    """Return captures by their model's parameters: the most of one text that count one thing, what fires or what is
    above a threshold, of one activation; of each size the first."""
    alike: dict[object, dict[int, Run]] = {}
    for run in runs:
        size, definition = run.manifest.model.get("parameters"), run.manifest.nnz_definition
        if size and (run.has("activity") or run.manifest.summary_only):
            # By whichever product, in whichever precision; a text without a checksum, of a killed run, is its own.
            counted = definition.partition(" in the ")[0], "ReLU squared" in definition
            text = [(entry.get("sha256") or run.path, entry.get("tokens")) for entry in run.manifest.text]
            alike.setdefault((counted, tuple(text)), {}).setdefault(size, run)
    return max(alike.values(), key=len, default={})


def series(results: Sequence[TrainingOutcome], apart: Sequence[str]) -> list[TrainingOutcome]:
    """Return the most trainings of one recipe and seed but for these fields, with equally many tokens a parameter and
    an L1 that had risen in full, each of another size, the smallest first."""
    longest: list[TrainingOutcome] = []
    for one in results:
        sizes: dict[int, TrainingOutcome] = {}
        for other in results:
            close = abs(other.tokens * one.parameters / (one.tokens * other.parameters or 1) - 1) <= EQUAL
            comparable = one.risen and other.risen and other.parameters
            if one.seed == other.seed and close and one.alike(other, *apart) and comparable:
                sizes.setdefault(other.parameters, other)
        if len(sizes) > len(longest):
            longest = [sizes[size] for size in sorted(sizes)]
    return longest


def _sizes(results: Sequence[TrainingOutcome]) -> str:
    """Return nnz and parameters of each training, in words."""
    return ", ".join(f"{one.nnz:.1f} at {one.parameters / 1e6:.1f} M parameters" for one in results)


def little_l1_is_free(runs: Sequence[Run]) -> Answer:
    """Check that an L1 up to 3e-5 raises the loss by less than 2 %: held out, or in training where nothing was."""
    results = training_outcomes(runs)
    plain = [one for one in results if one.recipe.get("l1") == 0]
    rises = [
        (one, other, other.loss / one.loss - 1)
        for one in plain
        for other in results
        if 0 < other.recipe.get("l1", 0) <= FREE_L1 and one.seed == other.seed and one.alike(other, "l1", "l1_warmup")
        if other.risen and one.heldout == other.heldout and np.isfinite(one.loss)
    ]
    if not rises:
        raise Missing(
            "It takes trainings of one recipe with l1 = 0 and with l1 up to 3e-5: `twell train --l1 0 --config NAME "
            "--text CORPUS --out M`, and the same with `--l1 3e-5`."
        )
    free = all(rise < LITTLE_LOSS for *_, rise in rises)  # not of a NaN, of one that diverged
    compared = [one for plain, other, _ in rises for one in (plain, other)]
    return Answer(
        ", ".join(f"loss {100 * rise:+.2f} % with L1 {one.recipe['l1']:g}" for _, one, rise in rises)
        + "; downstream not measured",
        f"{loss_of(compared)} {listed([plain.loss for plain, *_ in rises], '.3f')} nats without L1; {sized(compared)}",
        IN_PART if free else FAILS,
        "the loss rises by less than 2 % at each; as nothing downstream is measured, that is in part",
        of_seeds(len(rises)),
        tuple(one.name for one in compared),
    )


def gated_gains_more(runs: Sequence[Run]) -> Answer:
    """Check that a gated FFN gains more from sparsity than a plain one at the same L1: the forward pass, or else a
    training step."""
    both = pairs(
        runs, "gated", bool, "`twell train` with gated = true and with gated = false in its recipe", apart=("d_ff",)
    )
    rule = "the gated one's forward pass, or else its training step, gains more in every pair; in some: in part"
    counts = f"nnz {listed([one.nnz for one, _ in both], '.1f')} of {both[0][0].d_ff} gated, "
    counts += f"{listed([other.nnz for _, other in both], '.1f')} of {both[0][1].d_ff} plain"
    what, gains = timed(both)
    if not gains:
        says = f"{counts}; nothing was timed dense and sparse"
        return Answer(says, members(both), UNTOLD, rule, of_seeds(len(both)), named(both))
    gated, plain = (listed([each[side] for each in gains], ".2f") for side in range(2))
    verdict = graded(gains)
    return Answer(
        f"{what} runs {gated} times as fast gated, {plain} times plain; {counts}",
        f"FFNs of as many {'weights' if _equal(both) else 'columns'}; {members(both)}",
        verdict,
        ruled(verdict, rule),
        of_seeds(len(gains)),
        named(both),
    )


def _equal(both: Sequence[TrainingPair]) -> bool:
    """Return whether the two models of each pair have equally many parameters."""
    return all(abs(one.parameters / (other.parameters or 1) - 1) < EQUAL for one, other in both)


def relu_costs(runs: Sequence[Run]) -> Answer:
    """Compare the losses of ReLU and SiLU: what is claimed is of downstream tasks, so no verdict follows."""
    command = '`twell train` with activation = "silu" and "relu", l1 = 0'
    both = pairs(runs, "activation", lambda name: name == "silu", command)
    return Answer(
        f"{loss_of([one for pair in both for one in pair])} "
        f"{listed([relu.loss for _, relu in both], '.3f')} nats with ReLU, "
        f"{listed([silu.loss for silu, _ in both], '.3f')} with SiLU, "
        f"{listed([100 * (relu.loss / silu.loss - 1) for silu, relu in both], '+.2f')} %",
        members(both),
        UNTOLD,
        "the claim is of downstream tasks, which no run measures",
        of_seeds(len(both)),
        named(both),
    )


def memory_falls(runs: Sequence[Run]) -> Answer:
    """Check that the peak memory of training falls by at least 19 % with sparse kernels."""
    all_trainings = [one for one in training_outcomes(runs) if not np.isnan(one.peak)]
    for one in all_trainings:
        for other in all_trainings:
            if one.sparse and not other.sparse and one.alike(other, "tokens"):
                about = "greatest memory in use over each training"
                return _saved(one.peak, other.peak, about, of_seeds(1), (one.name, other.name))
    for run in runs:
        if run.has("training") and (answer := _memory_by_phase(run)):
            return answer
    raise Missing(
        "It takes two trainings of one recipe on a GPU, one by sparse kernels: `twell train --kernel auto …` and "
        "`twell train --kernel dense …`, or `twell bench --training`."
    )


def _memory_by_phase(run: Run) -> Answer | None:
    """Return the answer of one training that began with dense kernels and ended with sparse ones; None for another."""
    dense, sparse = (phase["peak_bytes"].dropna().astype(float) for phase in training_phases(run))
    if dense.empty or sparse.empty:
        return None
    about = f"{run.name}: greatest memory in use between two rows of its log, {len(sparse)} rows against {len(dense)}"
    return _saved(sparse.max(), dense.max(), about, "none: one training", (run.name,))


def _saved(sparse: float, dense: float, statistic: str, interval: str, names: tuple[str, ...]) -> Answer:
    """Return the answer that peaks of memory give, in bytes."""
    saved = 1 - sparse / dense
    return Answer(
        f"{sparse / 2**30:.2f} GiB with sparse kernels, {dense / 2**30:.2f} with dense ones, {100 * abs(saved):.0f} % "
        + ("more" if saved < 0 else "less"),
        statistic,
        HOLDS if saved >= 0.19 else IN_PART if saved > 0 else REVERSED if saved < 0 else FAILS,
        "at least 19 % less; less at all: in part; more: reversed",
        interval,
        names,
    )


def restarts_pay(runs: Sequence[Run]) -> Answer:
    """Check that starting dead neurons anew makes the model faster: its forward pass, or else a training step."""
    command = "`twell train` with restart_every = 1000 and with 0 in its recipe"
    both = pairs(runs, "restart_every", bool, command)
    says = (
        f"{listed([100 * one.dead for one, _ in both], '.1f')} % dead with restarts, "
        f"{listed([100 * other.dead for _, other in both], '.1f')} % without; nnz "
        f"{listed([one.nnz for one, _ in both], '.1f')} with, {listed([other.nnz for _, other in both], '.1f')} without"
    )
    rule = "the model gains more with restarts, in every pair; in some: in part"
    what, gains = timed(both)
    if not gains:
        return Answer(says, members(both), UNTOLD, rule, of_seeds(len(both)), named(both))
    anew, plain = (listed([each[side] for each in gains], ".3f") for side in range(2))
    verdict = graded(gains)
    says += f"; {what} runs {anew} times as fast with restarts, {plain} times without"
    return Answer(says, members(both), verdict, ruled(verdict, rule), of_seeds(len(gains)), named(both))


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
