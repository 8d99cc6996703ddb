"""Findings: what has been claimed about sparse feed-forward layers, each claim checked on a run.

    findings(run)                    a row a claim: the claim, what this run says, and whether the claim holds
    print(markdown(run))             the same as a Markdown table for a report
    python -m twell.analysis RUN …   several runs side by side: each verdict and the finding behind it

The claims are those of the paper that introduced the format and of its reports, reworded. They are declared in
`activity`, `speed` and, where one run of one finished model cannot tell, `beyond`. Cost: 0.2 s.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from twell.analysis.claims import activity, speed
from twell.analysis.claims.beyond import BEYOND
from twell.analysis.claims.claim import Claim
from twell.analysis.memo import memo_scope
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

HOLDS, FAILS, UNTOLD = "holds", "does not hold", "cannot be told from this run"
CLAIMS: tuple[Claim, ...] = (*activity.CLAIMS, *speed.CLAIMS)


def findings(run: Run) -> pd.DataFrame:
    """Check every claim on the run; a row a claim. Columns:

    topic; claim; this_run (what the run says, in words; empty where it cannot tell); statistic (with its n); verdict
    (holds, does not hold, cannot be told from this run); reason (what it takes for the claim to hold, or why the run
    cannot tell).
    """
    with memo_scope():
        rows = [_checked(run, claim) for claim in CLAIMS]
    rows += [_untold(topic, text, reason) for topic, text, reason in BEYOND]
    frame = pd.DataFrame(rows)
    verdicts = frame["verdict"].value_counts()
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": ", ".join(f"{verdict}: {verdicts.get(verdict, 0)}" for verdict in (HOLDS, FAILS, UNTOLD)),
    }
    return frame


def _checked(run: Run, claim: Claim) -> dict[str, str]:
    """Return the row of one claim: the answer of its check, or the reason why the run cannot tell."""
    try:
        answer = claim.check(run)
    except Missing as reason:
        return _untold(claim.topic, claim.text, str(reason))
    return {
        "topic": claim.topic,
        "claim": claim.text,
        "this_run": answer.says,
        "statistic": answer.statistic,
        "verdict": HOLDS if answer.holds else FAILS,
        "reason": f"holds if: {answer.rule}",
    }


def _untold(topic: str, text: str, reason: str) -> dict[str, str]:
    """Return the row of a claim that the run cannot settle, with the reason."""
    return {"topic": topic, "claim": text, "this_run": "", "statistic": "", "verdict": UNTOLD, "reason": reason}


def markdown(run: Run, beyond: bool = False) -> str:
    """Return the claims on one run as a Markdown table; with `beyond`, also those that no single run can settle."""
    lines = ["| claim | this run | statistic | verdict |", "|---|---|---|---|"]
    unsettled_by_any_run = {text for _, text, _ in BEYOND}
    for row in findings(run).to_dict("records"):
        if row["claim"] in unsettled_by_any_run and not beyond:
            continue
        finding = row["this_run"] or row["reason"]
        lines.append(_line((row["claim"], finding, row["statistic"], row["verdict"])))
    return "\n".join(lines)


def side_by_side(runs: Sequence[Run]) -> str:
    """Return the claims that at least one of the runs could settle, as a Markdown table with a column a run."""
    lines = [_line(("claim", *(run.name for run in runs))), "|" + "---|" * (len(runs) + 1)]
    tables = [findings(run) for run in runs]
    for rows in zip(*(table.to_dict("records") for table in tables), strict=True):
        if any(row["verdict"] != UNTOLD for row in rows):
            cells = [f"**{row['verdict']}**: {row['this_run'] or row['reason']}" for row in rows]
            lines.append(_line((rows[0]["claim"], *cells)))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    """Return one row of a Markdown table, with pipes and line ends in the cells escaped."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "⏎") for cell in cells) + " |"
