"""Page Findings: published claims about sparse feed-forward layers, each tested on this run."""

from __future__ import annotations

import html

import pandas as pd
import streamlit as st

from twell.app.runs.claims_data import CLAIMS, STUDIES, sweep_and_own
from twell.app.runs.study_figures import SPEEDS, cost_and_gain
from twell.app.ui import widgets
from twell.app.ui.formatting import plural, typeset, whole
from twell.app.ui.query import query
from twell.app.ui.url_state import current_run
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

HOLDS, IN_PART, UNTOLD = "holds", "holds in part", "cannot be told"
KINDS = {HOLDS: "yes", IN_PART: "part", UNTOLD: "open"}  # any other verdict: no
TITLES = '<div class="tw-claim names"><div>Claim</div><div>This run</div><div>Verdict, and the rule for it</div></div>'


def claims_html(frame: pd.DataFrame) -> str:
    """Return rows of `analysis.findings` as HTML: the claim and what it was measured on, the run's answer with its
    statistic and interval, verdict and rule.

    For a claim that the run cannot test, the reason takes the place of the answer.
    """
    lines = ['<div class="tw-claims">']
    for row in frame.itertuples():
        statistic = f"{row.statistic}; 95 %: {row.interval}" if row.interval else row.statistic
        texts = (row.claim, row.claim_scope, row.this_run, statistic, row.reason, row.verdict)
        claim, measured, answer, statistic, reason, verdict = (html.escape(typeset(str(text))) for text in texts)
        kind = KINDS.get(row.verdict, "no")
        if answer:
            answer_html, rule_html = (
                f"<p>{answer}</p><p class='tw-note'>{statistic}</p>",
                f"<p class='tw-note'>{reason}</p>",
            )
        else:
            answer_html, rule_html = f"<p class='tw-note'>{reason}</p>", ""
        verdict_html = f'<span class="tw-verdict {kind}">{verdict}</span>' if kind != "open" else ""
        scope = f"<p class='tw-note'>Measured on {measured}.</p>" if measured else ""
        lines.append(f'<div class="tw-claim"><div class="claim">{claim}{scope}</div><div>{answer_html}</div>')
        lines.append(f"<div>{verdict_html}{rule_html}</div></div>")
    return "".join([*lines, "</div>"])


def draw_page(run: Run) -> None:
    """Draw the claims that the run can test, by topic; then, folded up, those that it cannot."""
    result = query(run, CLAIMS)
    frame = result.frame
    is_tested = frame["verdict"] != UNTOLD
    tested, untested = frame[is_tested], frame[~is_tested]
    hold_count, part_count = (int((tested["verdict"] == verdict).sum()) for verdict in (HOLDS, IN_PART))
    caption = (
        f"{plural(len(frame), 'claim')} about sparse FFN layers, each tested on this run by a rule fixed beforehand: "
        f"of the {len(tested)} that this run can test, {hold_count} {'holds' if hold_count == 1 else 'hold'} and "
        f"{part_count} {'holds' if part_count == 1 else 'hold'} in part. This is one model on one text "
        f"({frame['scope'].iloc[0]}): a claim that fails here may hold elsewhere."
    )
    widgets.heading("Claims", caption, result)
    if tested.empty:
        st.info("This run can test none of them. The list below says what each claim needs.")
    else:
        st.html(TITLES)
    for topic, group in tested.groupby("topic", sort=False):
        st.html(f'<h4 class="tw-part">{html.escape(str(topic).capitalize())}</h4>{claims_html(group)}')
    if len(untested):
        with st.expander(f"{plural(len(untested), 'claim')} that this run cannot test"):
            st.html(claims_html(untested))


def draw_studies(run: Run) -> None:
    """Draw what sparsity costs and gains in the small trainings that ship; nothing where the package has none."""
    result = query(run, STUDIES)
    try:
        table = result.frame
    except Missing:
        return
    sweep = result.then(sweep_and_own)
    trained = table[~table["this_run"]]
    swept = sweep.frame[~sweep.frame["this_run"]]
    device, seeds = table.attrs.get("device") or "one GPU", swept["seed"].nunique()
    size, tokens = (whole(swept[name].median()) for name in ("parameters", "tokens"))
    caption = (
        f"{plural(len(swept), 'small training')} of one recipe, a dot each, with {plural(seeds, 'seed')}, {size} "
        f"parameters and {tokens} tokens: the larger L1, the fewer neurons fire. Left: what the held-out loss pays for "
        f"it. Right: the speed that it buys on {device}, measured after the training; a cross is this run, on its own "
        "device."
    )
    widgets.heading("What sparsity costs, and what it gains", caption, sweep)
    widgets.draw(cost_and_gain(sweep.frame), "studies", "Loss and speed against sparsity, a dot a training", wide=True)
    widgets.note(
        "Where the left curve is flat, sparsity is free; where a right one lies under 1, sparse kernels lose time. "
        "These models are small: on a GPU their FFNs are a small part of the pass, and their loss tells little of "
        "large models."
    )
    caption = "Beside the sweep: depth and width, gated and plain FFN, activation, dead neurons started anew."
    widgets.heading("Every training of the studies", caption, result)
    column = st.column_config.NumberColumn
    factor = dict.fromkeys([*SPEEDS, "cpu_model_speedup"], column(format="%.2f ×"))
    share = dict.fromkeys(("rise", "sparsity", "dead"), column(format="percent"))
    st.dataframe(
        trained[["name", "parameters", "steps", "loss", "rise", "nnz", "sparsity", "dead", *factor]],
        hide_index=True,
        height=320,
        column_config={"nnz": column(format="%.1f"), "loss": column("loss, nats", format="%.3f"), **share, **factor},
    )


widgets.title("Do published claims hold for this model?")
with widgets.show_errors():
    draw_page(current_run())
    draw_studies(current_run())
