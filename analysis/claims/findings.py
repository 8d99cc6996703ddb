"""Findings: what has been claimed about sparse feed-forward layers, each claim checked on a run, or on several.

    findings(run)                    a row a claim: the claim, what this run says, and a graded verdict
    findings([run, other, …])        the same, and the claims on trainings and between models over all of them
    print(markdown(run))             the same as a Markdown table for a report
    python -m twell.analysis RUN …   several runs side by side: each verdict and the finding behind it

The claims are those of the paper that introduced the format and of its reports, reworded. Each has a rule that was
fixed beforehand, in code, and what it was measured on stands beside what the run was measured on. They are declared in
`activity`, `tokens`, `speed`, `ablations`, `training`, `across` and, where no run can tell, `beyond`. Cost: 0.3 s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd

from twell.analysis.claims import ablations, across, activity, speed, tokens, training
from twell.analysis.claims.beyond import BEYOND
from twell.analysis.claims.claim import FAILS, HOLDS, UNTOLD, VERDICTS, Answer, Claim, listed_runs, scope
from twell.analysis.memo import memo_scope
from twell.analysis.summaries.read import open_summaries
from twell.workbench.errors import Missing, UserError
from twell.workbench.run.store import Run

__all__ = ["BEYOND", "CLAIMS", "FAILS", "HOLDS", "UNTOLD", "findings", "markdown", "side_by_side"]

CLAIMS: tuple[Claim, ...] = (*activity.CLAIMS, *tokens.CLAIMS, *speed.CLAIMS, *ablations.CLAIMS, *training.CLAIMS)


def findings(run: Run | Sequence[Run], *others: Run) -> pd.DataFrame:
    """Check every claim on the run, and those that compare models or trainings on it and the others; a row a claim. A
    claim on a training is checked on the first of them whose log can tell, which is named. Several runs are given in a
    list or one after another, the one that most claims are checked on first. Raises UserError for none.

    Columns: topic; claim; this_run (what the run says, in words; empty where it cannot tell); statistic (with its n);
    interval (95 %, or why there is none); verdict (holds, holds in part, does not hold, reversed, cannot be told);
    reason (the rule, or why it cannot be told); scope (what the run was measured on: parameters, layers, kernel,
    device; of a claim between models, the names of those that told); claim_scope (what the claim was measured on).
    """
    runs = (run, *others) if isinstance(run, Run) else (*run, *others)
    if not runs:
        raise UserError("Expected a run or several, got none: open one first, as in open_run('runs/mine').")
    run, where = runs[0], scope(runs[0])
    with memo_scope():
        rows = [_of_run(claim, run) for claim in CLAIMS if claim not in training.CLAIMS]
        rows += [_of_first(claim, runs) for claim in training.CLAIMS]
        together = f"none of {len(runs)} runs" if len(runs) > 1 else where
        rows += [
            _checked(claim.topic, claim.text, partial(claim.check, runs), together, claim.scope)
            for claim in across.CLAIMS
        ]
    rows += [_untold(topic, text, reason, where, "") for topic, text, reason in BEYOND]
    frame = pd.DataFrame(rows)
    counts = frame["verdict"].value_counts()
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": ", ".join(f"{verdict}: {counts.get(verdict, 0)}" for verdict in VERDICTS),
        "intervals": f"by groups of {open_summaries(run).clustered_by}",
    }
    return frame


def _of_run(claim: Claim, run: Run) -> dict[str, str]:
    """Return the row of a claim that is checked on one run."""
    return _checked(claim.topic, claim.text, partial(claim.check, run), scope(run), claim.scope)


def _of_first(claim: Claim, runs: Sequence[Run]) -> dict[str, str]:
    """Return the row of a claim on a training: of the first run that can tell, or why the very first cannot."""
    first = _of_run(claim, runs[0])
    if first["this_run"]:
        return first
    for run in runs[1:]:
        if (row := _of_run(claim, run))["this_run"]:
            return {**row, "scope": f"{run.name}, {row['scope']}"}
    return first


def _checked(topic: str, text: str, check: Callable[[], Answer], where: str, claimed: str) -> dict[str, str]:
    """Return the row of one claim: the answer of its check, or the reason why it cannot be told."""
    try:
        answer = check()
    except Missing as reason:
        return _untold(topic, text, str(reason), where, claimed)
    return {
        "topic": topic,
        "claim": text,
        "this_run": answer.says,
        "statistic": answer.statistic,
        "interval": answer.interval,
        "verdict": answer.verdict,
        "reason": f"rule: {answer.rule}",
        "scope": listed_runs(answer.of) if answer.of else where,
        "claim_scope": claimed,
    }


def _untold(topic: str, text: str, reason: str, where: str, claimed: str) -> dict[str, str]:
    empty = dict.fromkeys(("this_run", "statistic", "interval"), "")
    columns = {"topic": topic, "claim": text, **empty, "verdict": UNTOLD, "reason": reason}
    return {**columns, "scope": where, "claim_scope": claimed}


def markdown(run: Run, beyond: bool = False) -> str:
    """Return the claims on one run as a Markdown table; with `beyond`, also those that no single run can settle."""
    lines = ["| claim | this run | statistic | interval | verdict |", "|---|---|---|---|---|"]
    others = {text for _, text, _ in BEYOND} | {claim.text for claim in across.CLAIMS}
    for row in findings(run).to_dict("records"):
        if row["claim"] in others and not beyond:
            continue
        says = row["this_run"] or row["reason"]
        lines.append(_line((row["claim"], says, row["statistic"], row["interval"], row["verdict"])))
    return "\n".join(lines)


def side_by_side(runs: Sequence[Run]) -> str:
    """Return the claims that at least one of the runs could settle, or all of them together, as a Markdown table with a
    column a run."""
    lines = [_line(("claim", *(run.name for run in runs))), "|" + "---|" * (len(runs) + 1)]
    tables = [findings(run, *(other for other in runs if other is not run)) for run in runs]
    for rows in zip(*(table.to_dict("records") for table in tables), strict=True):
        if any(row["verdict"] != UNTOLD for row in rows):
            cells = [f"**{row['verdict']}**: {row['this_run'] or row['reason']}" for row in rows]
            lines.append(_line((rows[0]["claim"], *cells)))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    """Return one row of a Markdown table, with pipes and line ends in the cells escaped."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "⏎") for cell in cells) + " |"
