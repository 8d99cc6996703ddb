"""Findings: what has been claimed of sparse feed-forward layers, each claim against this run.

    findings(run)                    a row a claim: what it says, what this run says, and whether it holds
    print(markdown(run))             the same as a table for a report
    python -m twell.analysis RUN …   several runs side by side: verdict and what it rests on

The claims are those of the paper that introduced the format and of its reports, in our words. What one run of one
finished model cannot tell says why, and what could. Cost: 0.2 s.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from twell.analysis.claims import activity, speed
from twell.analysis.memo import memo_scope
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

HOLDS, FAILS, UNTOLD = "holds", "does not hold", "cannot be told from this run"

ONE_MODEL = "A run is of one finished model: record others and compare them."
TRAINING = "A run records forward passes, no training."
TASKS = "A run holds the loss on its text, and no downstream task."

BEYOND = (
    ("scale", "Mean nnz falls with the model's size, from 39 at 0.5 B to 24 at 2 B.", ONE_MODEL),
    ("scale", "A gated FFN gains more than a plain one at the same L1: 17.9 % against 11.2 %.", ONE_MODEL),
    ("quality", "The sparse model loses 0.2 points downstream: 46.4 to 46.2 %.", TASKS),
    ("quality", "Up to an L1 of 3e-5, downstream scores stay and the loss rises by less than 2 %.", ONE_MODEL),
    ("quality", "ReLU costs 0.7 points downstream against SiLU: 46.4 against 47.1 %.", TASKS),
    ("training", "Sparsity settles within about 1 000 steps.", TRAINING),
    ("training", "A training step gains from -1.5 % at 0.5 B to 21.9 % at 2 B.", TRAINING),
    ("training", "Peak training memory falls by 19 to 28 %, up to 1.5 B.", TRAINING),
    ("training", "At 2 B it rises by 22 %, with a larger micro-batch.", TRAINING),
    ("training", "Training gains more on a GPU of more multiprocessors (188 against 114).", TRAINING),
    ("training", "Starting dead neurons anew in training adds a point of speed (19.1 against 17.9 %).", TRAINING),
    ("method", "Speed measured on uniform random token ids is that of text.", "The run timed its own text alone."),
)


def findings(run: Run) -> pd.DataFrame:
    """Columns: topic; claim; this_run (what it says, in words); statistic (with n); verdict (holds, does not hold,
    cannot be told from this run); reason (what it takes to hold, or why it cannot be told)."""
    with memo_scope():
        rows = [_row(run, claim) for claim in (*activity.CLAIMS, *speed.CLAIMS)]
    rows += [_untold(topic, text, reason) for topic, text, reason in BEYOND]
    frame = pd.DataFrame(rows)
    counted = frame["verdict"].value_counts()
    frame.attrs = {
        "definition": run.manifest.nnz_definition,
        "note": ", ".join(f"{verdict}: {counted.get(verdict, 0)}" for verdict in (HOLDS, FAILS, UNTOLD)),
    }
    return frame


def _row(run: Run, claim: activity.Claim) -> dict[str, str]:
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
    return {"topic": topic, "claim": text, "this_run": "", "statistic": "", "verdict": UNTOLD, "reason": reason}


def markdown(run: Run, beyond: bool = False) -> str:
    """The claims that a run could settle as a Markdown table; with `beyond`, those that no single run can too."""
    lines = ["| claim | this run | statistic | verdict |", "|---|---|---|---|"]
    never = {text for _, text, _ in BEYOND}
    for row in findings(run).to_dict("records"):
        if row["claim"] in never and not beyond:
            continue
        says = row["this_run"] or row["reason"]
        lines.append(_line((row["claim"], says, row["statistic"], row["verdict"])))
    return "\n".join(lines)


def side_by_side(runs: Sequence[Run]) -> str:
    """The claims that at least one of the runs could settle, as a Markdown table with a column a run."""
    lines = [_line(("claim", *(run.name for run in runs))), "|" + "---|" * (len(runs) + 1)]
    tables = [findings(run) for run in runs]
    for rows in zip(*(table.to_dict("records") for table in tables), strict=True):
        if any(row["verdict"] != UNTOLD for row in rows):
            told = [f"**{row['verdict']}**: {row['this_run'] or row['reason']}" for row in rows]
            lines.append(_line((rows[0]["claim"], *told)))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "⏎") for cell in cells) + " |"
