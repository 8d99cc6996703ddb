"""Page Findings: published claims about sparse feed-forward layers, each tested on this run, or on those at hand."""

from __future__ import annotations

import html
from typing import Any

import pandas as pd
import streamlit as st

from twell.analysis.claims.claim import FAILS, HOLDS, IN_PART, REVERSED, UNTOLD, scope
from twell.analysis.claims.whole import whole_claim
from twell.analysis.memo import built_once
from twell.app.runs.claims_data import CLAIMS, EVIDENCE, STUDIES, other_trainings, sweep_and_own
from twell.app.runs.study_figures import cost_and_gain
from twell.app.ui import widgets
from twell.app.ui.formatting import marked_up, plural, typeset, typeset_form, whole
from twell.app.ui.query import fetch, query, query_with_others
from twell.app.ui.run_cache import shown
from twell.app.ui.run_catalog import find_runs
from twell.app.ui.url_state import current_run
from twell.workbench.run.store import Run

KINDS = {HOLDS: "yes", IN_PART: "part", UNTOLD: "open"}  # any other verdict: no
GROUPS = {  # by verdict, in the order of the page: what is said of one claim, and of several
    HOLDS: ("claim holds", "claims hold"),
    IN_PART: ("claim holds in part", "claims hold in part"),
    FAILS: ("claim does not hold", "claims do not hold"),
    REVERSED: ("claim is the other way round", "claims are the other way round"),
    UNTOLD: ("claim cannot be told by what was measured", "claims cannot be told by what was measured"),
}


COLUMNS: dict[str, tuple[str, str]] = {  # of the studies that are shown: name in words, form of its values
    "name": ("training", ""),
    "parameters": ("parameters", "{:,.0f}"),
    "steps": ("steps", "{:,.0f}"),
    "loss": ("held-out loss, nats", "{:.3f}"),
    "rise": ("loss over no L1", "{:+.2%}"),
    "nnz": ("neurons a token", "{:.1f}"),
    "sparsity": ("sparsity", "{:.2%}"),
    "dead": ("dead neurons", "{:.1%}"),
    "cpu_ffn_speedup": ("FFN on a CPU", "{:.2f} ×"),
    "cpu_model_speedup": ("pass on a CPU", "{:.2f} ×"),
    "ffn_speedup": ("FFN on a GPU", "{:.2f} ×"),
    "model_speedup": ("pass on a GPU", "{:.2f} ×"),
    "step_speedup": ("training step on a GPU", "{:.2f} ×"),
}


def claims_html(frame: pd.DataFrame, evidence: dict[str, str], own: str = "") -> str:
    """Return rows of `analysis.findings` as HTML: the claim and what it was measured on, a drawing of the evidence, the
    run's answer with its statistic and interval, verdict and rule.

    For a claim that the run cannot test, the reason takes the place of the answer. evidence: drawings by claim, HTML;
    own: the scope of this run, beside which any other is named
    """
    lines = ['<div class="tw-claims">']
    for row in frame.itertuples():
        statistic = f"{row.statistic}; 95 %: {row.interval}" if row.interval else row.statistic
        claim, answer, statistic, reason = map(marked_up, (row.claim, row.this_run, statistic, row.reason))
        scope = f"{str(row.topic).capitalize()}." + (f" Measured on {row.claim_scope}." if row.claim_scope else "")
        lines.append(f'<div class="tw-claim"><div class="claim">{claim}<p class="tw-note">{marked_up(scope)}</p></div>')
        if not row.this_run:
            lines.append(f"<div class='open'><p class='tw-note'>{reason}</p></div></div>")
            continue
        teller = "" if row.scope == own else f"<p class='tw-note'>Told by {marked_up(row.scope)}.</p>"
        pill = f'<span class="tw-verdict {KINDS.get(row.verdict, "no")}">{html.escape(row.verdict)}</span>'
        lines.append(f"<div>{evidence.get(row.claim, '')}</div>")
        lines.append(f"<div><p>{answer}</p>{teller}<p class='tw-note'>{statistic}</p></div>")
        lines.append(f"<div class='verdict'>{pill}<p class='tw-note'>{reason}</p></div></div>")
    return "".join([*lines, "</div>"])


def verdicts_html(tested: pd.DataFrame, own: str) -> str:
    """Return the verdicts alone as HTML: a line a claim, with what was measured and its interval, in GROUPS' order.

    own: the scope of the run itself; what others measured says so
    """
    order = list(GROUPS)
    names = "".join(f"<span>{name}</span>" for name in ("claim", "verdict", "measured", "95 %"))
    lines = [f'<div class="tw-verdicts"><div class="names">{names}</div>']
    for row in sorted(tested.itertuples(), key=lambda row: order.index(row.verdict)):
        measured = row.this_run if row.scope == own else f"other runs: {row.this_run}"
        said = [html.escape(typeset(text)) for text in (row.claim, row.verdict, measured, row.interval)]
        claim, verdict, measured, interval = (f'<span title="{text}">{text}</span>' for text in said)
        verdict = verdict.replace("<span", f'<span class="{KINDS.get(row.verdict, "no")}"', 1)
        lines.append(f"<div>{claim}{verdict}{measured}{interval}</div>")
    return "".join([*lines, "</div>"])


def draw_page(run: Run) -> None:
    """Draw the claims that the run can test, those that hold first; then, folded up, those that it cannot."""
    others = [shown(other) for other in other_trainings(run, find_runs())]
    result = query_with_others(run, others, CLAIMS) if others else query(run, CLAIMS)
    frame = result.frame
    own, is_tested = scope(run), frame["this_run"] != ""
    tested, untested = frame[is_tested], frame[~is_tested]
    by_others = int(((tested["scope"] != own) & (tested["verdict"] != UNTOLD)).sum())
    by_itself = int((tested["scope"] == own).sum())
    beside = f" and {plural(len(others), 'training')} of this folder" if others else ""
    caption = (
        f"{plural(len(frame), 'claim')} about sparse FFN layers, from the paper that introduced TwELL (arXiv "
        "2603.23198) and reports on it, in our words, each with a rule that was fixed beforehand; this run "
        f"can test {by_itself}. It is one model on one text ({own}): what fails here may hold elsewhere. "
        f"{plural(by_others, 'more claim')}, between models or on trainings, can be told by other runs, named "
        f"there: the trainings that ship{beside}."
    )
    whole = whole_claim(frame, own)
    said = html.escape(typeset(whole.sentence)).replace(f", {whole.verdict}:", f", <b>{whole.verdict}</b>:", 1)
    st.html(f'<p class="tw-lead">{said}</p>')
    widgets.heading("Claims", caption, result)
    if tested.empty:
        st.info("This run can test none of them. The list below says what each claim needs.")
    else:
        st.html(verdicts_html(tested, own))
    evidence = fetch(run, EVIDENCE)
    for verdict, (one, several) in GROUPS.items():
        group = tested[tested["verdict"] == verdict]
        if len(group):
            elsewhere = int((group["scope"] != own).sum())
            told = f", {elsewhere} of them by other runs{' either' * (verdict == UNTOLD)}" if elsewhere else ""
            title = f"{len(group)} {one if len(group) == 1 else several}{told}"
            st.html(f'<h2 class="tw-group-title">{title}</h2>{claims_html(group, evidence, own)}')
    if len(untested):
        with st.expander(f"{plural(len(untested), 'claim')} that this run cannot test, and what would"):
            st.html(claims_html(untested, {}))


def measured_on(attrs: dict[str, Any]) -> str:
    """Return in words on which devices, and on how many rows, the speeds of `analysis.studies` were measured."""
    gpu, cpu = attrs.get("device") or "one GPU", attrs.get("cpu_device") or "one CPU"
    step = f", a training step of {whole(attrs['step_rows'])} tokens" if attrs.get("step_rows") else ""
    return (
        f"measured after the training in batches of up to {whole(attrs['rows'])} rows on {gpu}{step}, and of up to "
        f"{whole(attrs['cpu_rows'])} rows on {cpu}"
    )


def draw_studies(run: Run) -> None:
    """Draw what sparsity costs and gains in the small trainings that ship; nothing where the package has none."""
    result = query(run, STUDIES)
    if not result.known:
        return
    table = result.frame
    sweep = result.then(sweep_and_own)
    trained = table[~table["this_run"]]
    swept = sweep.frame[~sweep.frame["this_run"]]
    seeds = swept["seed"].nunique()
    size, tokens = (whole(swept[name].median()) for name in ("parameters", "tokens"))
    caption = (
        f"{plural(len(swept), 'small training')} of one recipe, a dot each, with {plural(seeds, 'seed')}, {size} "
        f"parameters and {tokens} tokens: the larger L1, the fewer neurons fire. Left: what the held-out loss pays for "
        f"it. Right: the speed that it buys, {measured_on(table.attrs)}; green crosses are this run, on its own device."
    )
    widgets.heading("What sparsity costs, and what it gains", caption, sweep)
    widgets.draw(
        built_once(cost_and_gain, sweep.frame),
        "studies",
        "Loss and speed against sparsity, a dot a training",
        wide=True,
    )
    widgets.note(
        "Where the left curve is flat, sparsity is free; where a right one lies under 1, sparse kernels lose time. "
        "These models are small: on a GPU their FFNs are a small part of the pass, and their loss tells little of "
        "large models."
    )
    caption = (
        "Beside the sweep: depth and width, gated and plain FFN, activation, dead neurons started anew. Speeds are "
        "dense time over sparse time; –: not measured."
    )
    widgets.heading("Every training of the studies", caption, result)
    shown = trained[list(COLUMNS)].rename(columns={name: title for name, (title, _) in COLUMNS.items()})
    forms = {title: typeset_form(form) for title, form in COLUMNS.values() if form}
    widgets.table(shown.style.format(forms, na_rep="–"), height=320)


widgets.title("Do published claims hold for this model?")
with widgets.show_errors():
    draw_page(current_run())
    draw_studies(current_run())
