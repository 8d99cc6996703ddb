"""The parts that every claim is made of, and the checks that several of them share.

To add a claim, write its check in the file of its subject (`activity`, `speed`) and list it in that file's CLAIMS; one
that no single run can settle goes into `beyond`. A check takes a run and returns an Answer. It raises Missing, with the
reason as one sentence, where the run lacks what the check needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

LARGE = 4e8  # parameters: the smallest model that the claims are about has 0.5 B; a fifth less still counts


@dataclass(frozen=True)
class Answer:
    """What a run says about a claim.

    says: the finding in words, with its numbers. statistic: the statistic behind it, with its n. holds: whether the
    claim holds on this run. rule: what it takes for the claim to hold, in words.
    """

    says: str
    statistic: str
    holds: bool
    rule: str


@dataclass(frozen=True)
class Claim:
    """A claim, the topic it is listed under, and the check that settles it on a run."""

    topic: str
    text: str
    check: Callable[[Run], Answer]


def refuse_incomparable(comparable: bool, note: str) -> None:
    """Raise Missing with the note as a sentence if dense and sparse times cannot be compared."""
    if not comparable:
        raise Missing(f"{note[0].upper()}{note[1:]}.")
