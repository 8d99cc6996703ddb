"""Claims that compare models or trainings: checked over several runs, `findings(run, *others)`.

Each check takes all runs, the first among them, picks those that it can compare, and returns an Answer. Trainings are
compared by pairs of one recipe and seed that differ in one field; a verdict goes by all pairs. It raises Missing, with
the command that would make what is missing. To add one, write it here and list it in CLAIMS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twell.analysis.activity.layers import by_layer
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, PAPER_SIZES, REVERSED, UNTOLD, Answer
from twell.analysis.training import Training, training_phases, trainings
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

FREE_L1, LITTLE_LOSS = 3e-5, 0.02  # L1 up to which the loss rises by less than 2 %
LEAST_SIZES = 3
SIZE = ("layers", "tokens", "steps")  # fields in which a series over depth differs; one over width has its own
WIDTH = ("d_model", "d_ff", "kv_heads", "tokens", "steps")
EQUAL = 0.1  # how far apart tokens a parameter, or parameters, may be and still count as equal
NEITHER = "neither gains: sparse kernels lose time at this size"
NOISE = 0.005  # difference of two speedups that may be chance
Pair = tuple[Training, Training]


@dataclass(frozen=True)
class RunsClaim:
    """A claim, its topic, the check that settles it on several runs, and what it was measured on."""

    topic: str
    text: str
    check: Callable[[Sequence[Run]], Answer]
    scope: str = PAPER_SIZES


def pairs(
    runs: Sequence[Run], field: str, test: Callable[[Any], bool], command: str, apart: tuple[str, ...] = ()
) -> list[Pair]:
    """Return pairs of trainings of one recipe but for a field: one whose value meets the test, and one whose does not.

    apart: further fields in which they may differ. Of pairs of one seed all are returned; without any, the first of
    different seeds. Missing, with the command, where there is none.
    """
    all_trainings = trainings(runs)
    matched = [
        (one, other)
        for one in all_trainings
        for other in all_trainings
        if test(one.recipe.get(field)) and not test(other.recipe.get(field)) and one.alike(other, field, *apart)
    ]
    if not matched:
        raise Missing(f"It takes two trainings of one recipe that differ in {field}: {command}.")
    return [pair for pair in matched if pair[0].seed == pair[1].seed] or matched[:1]


def ruled(verdict: str, rule: str) -> str:
    """Return the rule, after the reason why there is no verdict where neither side gained."""
    return f"{NEITHER}; it takes: {rule}" if verdict == UNTOLD else rule


def of_seeds(count: int) -> str:
    """Return why there is no interval over so many pairs of trainings."""
    return "none: one training of each" if count == 1 else f"none: {count} pairs of trainings, of a seed each"


def sized(results: Sequence[Training]) -> str:
    """Return how many models, how large, and on how many tokens a parameter they were trained, in words."""
    sizes = [one.parameters / 1e6 for one in results]
    tokens = np.mean([one.tokens / (one.parameters or 1) for one in results])
    span = f"{min(sizes):.3g}" if np.ptp(sizes) < 0.1 * max(sizes) else f"{min(sizes):.3g} to {max(sizes):.3g}"
    return f"{len(results)} models of {span} M parameters, {tokens:.2g} tokens a parameter"


def listed(values: Sequence[float], form: str) -> str:
    """Return numbers in words, one a pair."""
    return " and ".join(format(value, form) for value in values)


def graded(gains: Sequence[tuple[float, float]]) -> str:
    """Return the verdict on a claim that the first of each pair of gains is the greater: in all, in some, or in none.

    A ratio within NOISE of 1 tells neither; where no side gains anything, it cannot be told.
    """
    if max(max(pair) for pair in gains) <= 1:
        return UNTOLD
    ratios = np.array([one / other for one, other in gains])
    better, worse = ratios > 1 + NOISE, ratios < 1 - NOISE
    return HOLDS if better.all() else IN_PART if better.any() else REVERSED if worse.all() else FAILS


def scale(runs: Sequence[Run]) -> Answer:
    """Check that mean nnz falls from each size of model to the next: over depth, as the claim has it, or else width."""
    depth, width = (series(trainings(runs), apart) for apart in (SIZE, WIDTH))
    if len(depth) >= LEAST_SIZES or len(width) >= LEAST_SIZES:
        chosen, other = (depth, width) if len(depth) >= LEAST_SIZES else (width, [])
        says = f"over depth {_sizes(chosen)}" if chosen is depth else f"over width {_sizes(chosen)}"
        says += f"; over width {_sizes(other)}" if len(other) >= LEAST_SIZES else ""
        nnz, about = np.array([one.nnz for one in chosen]), f"one recipe, {sized(chosen)}"
    else:
        captured = {
            run.manifest.model.get("parameters") or 0: run
            for run in runs
            if run.has("activity") or run.manifest.summary_only
        }
        means = {size: by_layer(run)["mean"].mean() for size, run in sorted(captured.items()) if size}
        if len(means) < LEAST_SIZES:
            raise Missing(
                f"It takes trainings of {LEAST_SIZES} sizes of one recipe whose L1 had risen in full, got "
                f"{max(len(depth), len(width))}, or captures of as many sizes, got {len(means)}: `twell train "
                "--config paper-8x2048 --text CORPUS --out M`, the same with paper-18x2048 and paper-28x2048, then "
                "`twell capture` of each."
            )
        says = ", ".join(f"{mean:.1f} at {size / 1e9:.2f} B" for size, mean in means.items())
        nnz, about = np.array(list(means.values())), f"{len(means)} captures"
    falls, whole = (np.diff(nnz) < 0).all(), nnz[-1] < nnz[0]
    return Answer(
        says,
        f"mean nnz over layers of {len(nnz)} sizes; {about}",
        HOLDS if falls else IN_PART if whole else REVERSED if (np.diff(nnz) > 0).all() else FAILS,
        "it falls from each size to the next; from the least to the greatest alone: in part; rises each time: reversed",
        "none: one model of each size",
    )


def series(results: Sequence[Training], apart: Sequence[str]) -> list[Training]:
    """Return the most trainings of one recipe and seed but for these fields, with equally many tokens a parameter and
    an L1 that had risen in full, each of another size, the smallest first."""
    longest: list[Training] = []
    for one in results:
        sizes: dict[int, Training] = {}
        for other in results:
            close = abs(other.tokens * one.parameters / (one.tokens * other.parameters or 1) - 1) <= EQUAL
            comparable = one.risen and other.risen and other.parameters
            if one.seed == other.seed and close and one.alike(other, *apart) and comparable:
                sizes.setdefault(other.parameters, other)
        if len(sizes) > len(longest):
            longest = [sizes[size] for size in sorted(sizes)]
    return longest


def _sizes(results: Sequence[Training]) -> str:
    """Return nnz and parameters of each training, in words."""
    return ", ".join(f"{one.nnz:.1f} at {one.parameters / 1e6:.1f} M parameters" for one in results)


def little_l1_is_free(runs: Sequence[Run]) -> Answer:
    """Check that an L1 up to 3e-5 raises the held-out loss by less than 2 %."""
    results = trainings(runs)
    plain = [one for one in results if one.recipe.get("l1") == 0]
    rises = [
        (one, other, other.loss / one.loss - 1)
        for one in plain
        for other in results
        if 0 < other.recipe.get("l1", 0) <= FREE_L1 and one.seed == other.seed and one.alike(other, "l1", "l1_warmup")
    ]
    if not rises:
        raise Missing(
            "It takes trainings of one recipe with l1 = 0 and with l1 up to 3e-5: `twell train --l1 0 --config NAME "
            "--text CORPUS --out M`, and the same with `--l1 3e-5`."
        )
    most = max(rise for *_, rise in rises)
    return Answer(
        ", ".join(f"loss {100 * rise:+.2f} % with L1 {one.recipe['l1']:g}" for _, one, rise in rises)
        + "; downstream not measured",
        f"held-out loss {listed([plain.loss for plain, *_ in rises], '.3f')} nats without L1; "
        + sized([one for plain, other, _ in rises for one in (plain, other)]),
        IN_PART if most < LITTLE_LOSS else FAILS,
        "the loss rises by less than 2 % at each; as nothing downstream is measured, that is in part",
        of_seeds(len(rises)),
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
    for name, what in (("model_speedup", "the forward pass"), ("step_speedup", "a training step")):
        gains = [(one.speeds[name], other.speeds[name]) for one, other in both]
        gains = [each for each in gains if not np.isnan(sum(each))]
        if gains:
            gated, plain = (listed([each[side] for each in gains], ".2f") for side in range(2))
            verdict = graded(gains)
            return Answer(
                f"{what} runs {gated} times as fast gated, {plain} times plain; {counts}",
                f"FFNs of as many {'weights' if _equal(both) else 'columns'}; {members(both)}",
                verdict,
                ruled(verdict, rule),
                of_seeds(len(gains)),
            )
    return Answer(f"{counts}; nothing was timed dense and sparse", members(both), UNTOLD, rule, of_seeds(len(both)))


def members(both: Sequence[Pair]) -> str:
    """Return `sized` of the models of all pairs."""
    return sized([one for pair in both for one in pair])


def _equal(both: Sequence[Pair]) -> bool:
    """Return whether the two models of each pair have equally many parameters."""
    return all(abs(one.parameters / (other.parameters or 1) - 1) < EQUAL for one, other in both)


def relu_costs(runs: Sequence[Run]) -> Answer:
    """Compare the held-out losses of ReLU and SiLU: what is claimed is of downstream tasks, so no verdict follows."""
    command = '`twell train` with activation = "silu" and "relu", l1 = 0'
    both = pairs(runs, "activation", lambda name: name == "silu", command)
    return Answer(
        f"held-out loss {listed([relu.loss for _, relu in both], '.3f')} nats with ReLU, "
        f"{listed([silu.loss for silu, _ in both], '.3f')} with SiLU, "
        f"{listed([100 * (relu.loss / silu.loss - 1) for silu, relu in both], '+.2f')} %",
        members(both),
        UNTOLD,
        "the claim is of downstream tasks, which no run measures",
        of_seeds(len(both)),
    )


def memory_falls(runs: Sequence[Run]) -> Answer:
    """Check that the peak memory of training falls by at least 19 % with sparse kernels."""
    all_trainings = [one for one in trainings(runs) if not np.isnan(one.peak)]
    for one in all_trainings:
        for other in all_trainings:
            if one.sparse and not other.sparse and one.alike(other):
                return _saved(one.peak, other.peak, "greatest memory in use over each training", of_seeds(1))
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
    return _saved(sparse.max(), dense.max(), about, "none: one training")


def _saved(sparse: float, dense: float, statistic: str, interval: str) -> Answer:
    """Return the answer that peaks of memory give, in bytes."""
    saved = 1 - sparse / dense
    return Answer(
        f"{sparse / 2**30:.2f} GiB with sparse kernels, {dense / 2**30:.2f} with dense ones, {100 * saved:.0f} % less",
        statistic,
        HOLDS if saved >= 0.19 else IN_PART if saved > 0 else REVERSED,
        "at least 19 % less; less at all: in part; more: reversed",
        interval,
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
    for name, what in (("model_speedup", "the forward pass"), ("step_speedup", "a training step")):
        gains = [(one.speeds[name], other.speeds[name]) for one, other in both]
        gains = [each for each in gains if not np.isnan(sum(each))]
        if gains:
            anew, plain = (listed([each[side] for each in gains], ".3f") for side in range(2))
            verdict = graded(gains)
            says += f"; {what} runs {anew} times as fast with restarts, {plain} times without"
            return Answer(says, members(both), verdict, ruled(verdict, rule), of_seeds(len(gains)))
    return Answer(says, members(both), UNTOLD, rule, of_seeds(len(both)))


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
