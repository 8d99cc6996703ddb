"""The claim as a whole: what the graded verdicts on its parts come to, in one sentence.

The paper claims that a little L1 in training leaves few neurons firing at hardly any loss, and that kernels which skip
the others save time, energy and memory. Each of PARTS is graded by a claim of `findings`, and the rule that joins them
was fixed beforehand: the whole holds where all six do; it holds as far as it was measured where those that can be told
do; in part where any of them holds, if only in part; and not where none does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from twell.analysis.claims import across, activity, speed, training
from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, REVERSED, UNTOLD, VERDICTS

SO_FAR = "holds as far as it was measured"
SUBJECT = (
    "The paper's claim as a whole, that a little L1 in training leaves few neurons firing at hardly any loss and that "
    "skipping the others saves time, energy and memory"
)
PARTS = {  # by check: the part of the statement that it grades, in words
    activity.sparse: "few neurons fire",
    across.little_l1_is_free: "hardly any loss",
    speed.faster: "a faster pass",
    speed.energy: "less energy a token",
    training.step_gains: "faster training",
    across.memory_falls: "less memory in training",
}
_IN_WORDS = {  # by verdict: what is said of one part, and of several
    HOLDS: ("holds", "hold"),
    IN_PART: ("holds in part", "hold in part"),
    FAILS: ("does not hold", "do not hold"),
    REVERSED: ("is the other way round", "are the other way round"),
    UNTOLD: ("cannot be told", "cannot be told"),
}


@dataclass(frozen=True)
class Whole:
    """The verdict on the claim as a whole, and a sentence with it and those on its parts."""

    verdict: str
    sentence: str


def whole_claim(frame: pd.DataFrame, own: str) -> Whole:
    """Join the verdicts on the parts of the claim.

    frame: the rows of `findings`; own: the scope of the run itself, beside which parts told by others are marked
    """
    claims = (*activity.CLAIMS, *speed.CLAIMS, *training.CLAIMS, *across.CLAIMS)
    words = {claim.text: PARTS[claim.check] for claim in claims if claim.check in PARTS}
    rows = frame[frame["claim"].isin(list(words))]
    verdict = _joined(rows["verdict"].tolist())
    clauses = []
    for each in VERDICTS:
        group = rows[rows["verdict"] == each]
        if len(group):
            names = [words[row.claim] + _beside(row, own) for row in group.itertuples()]
            clauses.append(f"{len(names)} {_IN_WORDS[each][len(names) > 1]}: {', '.join(names)}")
    sentence = f"{SUBJECT}, {verdict}: of its {len(rows)} parts {'; '.join(clauses)}."
    return Whole(verdict, " ".join([sentence, *_why_untold(rows)]))


def _beside(row: Any, own: str) -> str:
    """Return what stands in brackets after a part: the run's own interval where it is one, or that others tell it."""
    if row.verdict == UNTOLD:
        return ""
    if row.scope != own:
        return " (other runs)"
    return f" ({row.interval})" if row.interval[:1].isdigit() else ""


def _why_untold(rows: pd.DataFrame) -> list[str]:
    """Return, each once, why this run's own figures cannot tell a part; what a command would add is in the rows."""
    reasons = rows.loc[rows["verdict"] == UNTOLD, "reason"]
    return [reason for reason in dict.fromkeys(reasons) if "`" not in reason]


def _joined(verdicts: list[str]) -> str:
    """Return the verdict on the whole, by the rule above."""
    told = [verdict for verdict in verdicts if verdict != UNTOLD]
    if not told:
        return UNTOLD
    if all(verdict == HOLDS for verdict in told):
        return HOLDS if len(told) == len(verdicts) else SO_FAR
    return IN_PART if {HOLDS, IN_PART} & set(told) else FAILS
