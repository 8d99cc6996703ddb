"""Generate data/CLAIMS.md, the page of claims: what has been claimed of sparse FFN layers, checked on one run.

    python -m twell.analysis.exports.pages    writes it anew from the recorded run that ships

Verdicts, figures and rules are those of `findings(run)`.
"""

from __future__ import annotations

from twell.analysis.claims.findings import UNTOLD, findings
from twell.workbench.run.store import Run

OPENING = """# Claims

Generated from the recorded run `{name}` by `make docs`; a test compares this page with what that prints. {about}

The claims are those of the paper that introduced the format (arXiv 2603.23198) and of reports on it, in our words. A
fixed rule settles each; where a reviewer would want another rule is in [the log](log/analysis.md). A verdict near its
edge says little: [the log](log/model.md) names those that turned between trainings of one recipe.

The same for runs of yours: the dashboard's *Findings* page, `twell export RUN --table findings`, or several runs side
by side with `python -m twell.analysis RUN RUN`.

{counts}.

## Settled by this run

| claim | verdict | this run | statistic | rule |
|---|---|---|---|---|
{settled}

## Not settled by this run

| claim | why |
|---|---|
{open}
"""


def page(run: Run) -> str:
    """Return the page as Markdown."""
    table = findings(run)
    rows = table.to_dict("records")
    settled = [
        (
            row["claim"],
            f"**{row['verdict']}**",
            row["this_run"],
            row["statistic"],
            row["reason"].removeprefix("holds if: "),
        )
        for row in rows
        if row["verdict"] != UNTOLD
    ]
    unsettled = [(row["claim"], row["reason"]) for row in rows if row["verdict"] == UNTOLD]
    manifest = run.manifest
    about = (
        f"The run: {run.layers} layers of {manifest.model['d_model']} × {run.d_ff}, "
        f"{manifest.model['parameters']:,} parameters, {manifest.tokens:,} tokens of text, {manifest.device}."
    )
    return OPENING.format(
        name=run.name,
        about=about,
        counts=table.attrs["note"][0].upper() + table.attrs["note"][1:],
        settled="\n".join(map(_line, settled)),
        open="\n".join(map(_line, unsettled)),
    )


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
