"""Generate data/CLAIMS.md, the page of claims: what has been claimed of sparse FFN layers, checked on one run.

    python -m twell.analysis.exports.pages    writes it anew from the recorded run that ships

Verdicts, figures and rules are those of `findings(run)`.
"""

from __future__ import annotations

from collections.abc import Hashable

from twell.analysis.claims.claim import VERDICTS, scope
from twell.analysis.claims.findings import UNTOLD, findings
from twell.analysis.claims.training import bundled_settles
from twell.analysis.shipped import recorded_trainings, study_runs
from twell.workbench.run.manifest import spelled
from twell.workbench.run.store import Run

OPENING = """# Claims

Generated from the recorded run `{name}` by `make docs`; a test compares this page with what that prints. {about}

The claims are those of the paper that introduced the format (arXiv 2603.23198) and of reports on it, in our words, and
what pruning and thresholds rest on. A fixed rule settles each: it holds, holds in part, does not hold, is reversed, or
cannot be told. What each was measured on stands beside it. Intervals are of 95 %, those over tokens {intervals}.

The same for runs of yours: the dashboard's *Findings* page, `twell export RUN --table findings`, or several runs side
by side with `python -m twell.analysis RUN RUN`, which compares models and trainings too.

{counts}.

## Settled by this run

| claim (measured on) | verdict | this run | statistic | interval | rule |
|---|---|---|---|---|---|
{settled}

## Not settled by this run

| claim (measured on) | why |
|---|---|
{open}

## What changed, and why

Until 2026-11-24 a claim held or did not, and intervals took sequences for independent. An audit would not sign ten of
sixteen verdicts on this run and on the bundled model's ([the log](log/analysis.md)). Since 2026-11-25, after these
results were seen, one rule grades every interval: on the claim's side it holds, on the other it does not, across both
it cannot be told, or holds in part where the rule has parts. On this run that changed parts of URLs alone.

| claim | before | now | why |
|---|---|---|---|
{changed}
"""

# By the beginning of a claim: its verdict on this run before, and why its rule is another now.
BEFORE = {
    "A little L1": ("holds", "99.0 % sparsity counted as half a percent firing; it is twice that"),
    "More than 30 %": ("does not hold", "29.8 % is at the edge, and more text would wake some of the silent"),
    "The fullest token": (
        "does not hold",
        "each layer's own mean was the measure, so a quiet layer outdid the fullest token",
    ),
    "The first token": (
        "does not hold",
        "layers voted, so quiet ones outdid the busy one: now their sum",
    ),
    "After the first token": (
        "holds",
        "nothing asked whether nnz falls, two exponentials were not tried, and a difference in AICc of 2 was taken for "
        "certain",
    ),
    "Pieces whose sequel": ("does not hold", "each token is told by itself, if it occurs in ten sequences"),
    "Function words": (
        "does not hold, with parts of URLs",
        "two claims, and the difference from all others",
    ),
    "Parts of URLs": (
        "does not hold, with function words",
        "the same; an interval across 0 settles nothing",
    ),
    "Tokens fire little": (
        "does not hold",
        "pooled over tokens, it mixes in which tokens come before surprises",
    ),
    "FFN layers hold": ("does not hold", "without its embedding, they hold two thirds"),
    "The forward pass gains up": ("does not hold", "it is of 1.5 B parameters, and this model has 0.44 B"),
    "Speed measured on uniform": ("cannot be told", "the bench that ships times both"),
    "Sparsity settles": ("cannot be told", "the log of a training ships with the bundled model, and is long enough"),
    "A training step gains": ("cannot be told", "a recorded training went from dense kernels to sparse ones"),
    "Peak training memory": ("cannot be told", "the same training: before and after"),
}


def page(run: Run) -> str:
    """Return the page as Markdown."""
    trainings, recorded = study_runs(), recorded_trainings()
    table = findings(run, *recorded, *trainings)
    rows = [_settled_by_bundled(row) for row in table.to_dict("records")]
    settled = [
        (
            _claim(row),
            f"**{row['verdict']}**",
            *(row[name] for name in ("this_run", "statistic", "interval")),
            row["reason"].removeprefix("rule: "),
        )
        for row in rows
        if row["verdict"] != UNTOLD
    ]
    unsettled = [
        (
            _claim(row),
            f"{row['this_run']}; 95 %: {row['interval']}; {row['reason']}" if row["this_run"] else row["reason"],
        )
        for row in rows
        if row["verdict"] == UNTOLD
    ]
    manifest = run.manifest
    about = (
        f"The run: {run.layers} layers of {manifest.model['d_model']} × {spelled(manifest.widths, str)}, "
        f"{manifest.model['parameters']:,} parameters, {manifest.tokens:,} tokens of text, kernel "
        f"{manifest.kernel['name']}, {manifest.device}."
    )
    if trainings:
        about += f" Claims that compare models are checked on {len(trainings)} small trainings too, [studies](studies)."
    for other in recorded:
        about += f" Those on training are checked on `{other.name}`: {scope(other)}."
    return OPENING.format(
        name=run.name,
        about=about,
        intervals=table.attrs["intervals"],
        counts=", ".join(
            f"{verdict}: {sum(row['verdict'] == verdict for row in rows)}" for verdict in VERDICTS
        ).capitalize(),
        settled="\n".join(map(_line, settled)),
        open="\n".join(map(_line, unsettled)),
        changed="\n".join(map(_line, _changes(rows))),
    )


def _settled_by_bundled(row: dict[Hashable, str]) -> dict[Hashable, str]:
    """Return a row; where no log here is long enough to tell when sparsity settles, that of the bundled model's."""
    if row["verdict"] != UNTOLD or not row["claim"].startswith("Sparsity settles"):
        return row
    answer = bundled_settles()
    says: dict[Hashable, str] = {"this_run": answer.says, "statistic": answer.statistic, "interval": answer.interval}
    return {**row, **says, "verdict": answer.verdict, "reason": f"rule: {answer.rule}"}


def _claim(row: dict[Hashable, str]) -> str:
    """Return a claim with what it was measured on."""
    return f"{row['claim']} ({row['claim_scope']})" if row["claim_scope"] else row["claim"]


def _changes(rows: list[dict[Hashable, str]]) -> list[tuple[str, ...]]:
    """Return claim, verdict before, verdict now and why, of each claim whose rule is another."""
    return [
        (row["claim"], before, row["verdict"], why)
        for row in rows
        for beginning, (before, why) in BEFORE.items()
        if row["claim"].startswith(beginning)
    ]


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
