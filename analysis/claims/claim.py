"""The parts that every claim is made of, and the checks that several of them share.

To add a claim, write its check in the file of its subject (`activity`, `tokens`, `speed`, `training`) and list it in
that file's CLAIMS; one of several runs goes into `across`, one that no run can settle into `beyond`. A check takes a
run and returns an Answer. It raises Missing, with the reason as one sentence, where the run lacks what the check needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twell.workbench.errors import Missing
from twell.workbench.run.manifest import spelled
from twell.workbench.run.store import Run

# Verdicts. In part: short of what is claimed, or in some places alone. Reversed: the opposite is certain.
HOLDS, IN_PART, FAILS, REVERSED, UNTOLD = "holds", "holds in part", "does not hold", "reversed", "cannot be told"
VERDICTS = (HOLDS, IN_PART, FAILS, REVERSED, UNTOLD)

LARGE = 4e8  # parameters: the smallest model that the claims are about has 0.5 B; a fifth less still counts
BILLION = 1.2e9  # parameters: a fifth less than 1.5 B
LISTED = 6  # names of runs in one cell
DEEP = 16  # layers from which a profile over depth compares with one of 28

# What the claims were measured on.
PAPER = "1.5 B parameters, 28 layers of 2048 × 5632, L1 2e-5"
PAPER_SIZES = "0.5 to 2 B parameters, FFNs of 5632, L1 2e-5"
PAPER_SPEED = "0.5 to 2 B parameters, their kernels, H100 PCIe, uniform random ids of 2048 tokens"


@dataclass(frozen=True)
class Answer:
    """What a run says about a claim.

    says: the finding in words, with its numbers; statistic: the statistic behind it, with its n; verdict: one of
    VERDICTS; rule: what each verdict takes, in words; interval: 95 % of the number that the rule goes by, or why there
    is none; of: the runs that it compares, by name, where these are others than the one that is asked.
    """

    says: str
    statistic: str
    verdict: str
    rule: str
    interval: str = ""
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Claim:
    """A claim, the topic it is listed under, the check that settles it on a run, and what it was measured on."""

    topic: str
    text: str
    check: Callable[[Run], Answer]
    scope: str = PAPER


def scope(run: Run) -> str:
    """Return what a run was measured on: parameters, layers, kernel and device."""
    manifest, model = run.manifest, run.manifest.model
    parameters = model.get("parameters")
    size = f"{parameters:,} parameters, " if parameters else ""
    width = f"{model['d_model']} × " if model.get("d_model") else ""
    width += spelled(manifest.widths, str)
    return f"{size}{run.layers} layers of {width}, kernel {manifest.kernel['name']}, {manifest.device}"


def listed_runs(names: Sequence[str]) -> str:
    """Return names of runs in words, the first few of many; one that stands there twice is named once."""
    names = list(dict.fromkeys(names))
    rest = len(names) - LISTED
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:LISTED])} and {rest} more"


def between(low: float, high: float, unit: str = "", form: str = "") -> str:
    """Return an interval in words, as the cells of tables have it; three digits, and as many decimals at both ends."""
    if np.isnan(low + high):
        return "not known"
    return f"{low:{form}} to {high:{form}}{unit}" if form else f"{' to '.join(_alike(low, high))}{unit}"


def _alike(*values: float) -> list[str]:
    short = [f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}" for value in values]
    if any("e" in text for text in short):  # nearly 0
        return short
    decimals = max(len(text.partition(".")[2]) for text in short)
    return [f"{value:,.{decimals}f}" for value in values]


def by_interval(low: float, high: float, claimed: float, nothing: float) -> str:
    """Return the verdict on a claim that a number is above `claimed`, where `nothing` would be no effect at all, at or
    below `claimed`: by the side of each on which its whole interval lies; across both, it cannot be told."""
    if low > claimed:
        return HOLDS
    if low > nothing:
        return IN_PART
    if high < nothing:
        return REVERSED
    return FAILS if high < claimed else UNTOLD


def refuse_incomparable(comparable: bool, note: str) -> None:
    """Raise Missing with the note as a sentence if dense and sparse times cannot be compared."""
    if not comparable:
        raise Missing(f"{note[0].upper()}{note[1:]}.")


def shallow(run: Run) -> str:
    """Return a clause for a profile over the depth of a model with few layers; empty for a deep one."""
    return "" if run.layers >= DEEP else f"; seen or not in a shallow model, {run.layers} layers against 28"
