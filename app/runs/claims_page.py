"""Findings: what has been claimed of sparse feed-forward layers, and what this run has to say to each claim."""

from __future__ import annotations

import html

import pandas as pd
import streamlit as st

from twell.app.runs.claims_data import CLAIMS
from twell.app.ui import widgets
from twell.app.ui.formatting import plural, typeset
from twell.app.ui.query import query
from twell.app.ui.url_state import current_run
from twell.workbench.run.store import Run

HOLDS, FAILS = "holds", "does not hold"
NAMES = (
    '<div class="tw-claim names"><div>What is claimed</div><div>This run</div>'
    "<div>Verdict, and the rule for it</div></div>"
)


def rows_of(frame: pd.DataFrame) -> str:
    """Claims as HTML: the claim, what the run says, the statistic, the verdict and what it takes."""
    out = ['<div class="tw-claims">']
    for row in frame.itertuples():
        texts = (row.claim, row.this_run, row.statistic, row.reason, row.verdict)
        claim, says, statistic, reason, verdict = (html.escape(typeset(str(text))) for text in texts)
        kind = {HOLDS: "yes", FAILS: "no"}.get(row.verdict, "open")
        answer = f"<p>{says}</p><p class='tw-note'>{statistic}</p>" if says else f"<p class='tw-note'>{reason}</p>"
        rule = f"<p class='tw-note'>{reason}</p>" if says else ""
        mark = f'<span class="tw-verdict {kind}">{verdict}</span>' if kind != "open" else ""
        out.append(f'<div class="tw-claim"><div class="claim">{claim}</div><div>{answer}</div>')
        out.append(f"<div>{mark}{rule}</div></div>")
    return "".join([*out, "</div>"])


def page(run: Run) -> None:
    """Claims that the run settles, by topic; then those that it cannot."""
    result = query(run, CLAIMS)
    frame = result.frame
    told = frame[frame["verdict"].isin([HOLDS, FAILS])]
    untold = frame[~frame["verdict"].isin([HOLDS, FAILS])]
    holding = int((told["verdict"] == HOLDS).sum())
    said = (
        f"{plural(len(frame), 'claim')} about such layers, each tested on this run by a rule fixed beforehand: "
        f"{holding} of the {len(told)} that this run can test {'holds' if holding == 1 else 'hold'}. One model on one "
        "text: a claim that fails here may hold elsewhere."
    )
    widgets.heading("Claims", said, result)
    if told.empty:
        st.info("This run can test none of them: see below what each one needs.")
    else:
        st.html(NAMES)
    for topic, group in told.groupby("topic", sort=False):
        st.html(f'<h4 class="tw-part">{html.escape(str(topic).capitalize())}</h4>{rows_of(group)}')
    if len(untold):
        with st.expander(f"{plural(len(untold), 'claim')} that this run cannot test"):
            st.html(rows_of(untold))


widgets.title("Does what is claimed hold here?")
with widgets.show_errors():
    page(current_run())
