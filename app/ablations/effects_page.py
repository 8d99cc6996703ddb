"""Page What matters: what the loss says when neurons, firings or layers are taken away."""

from __future__ import annotations

import html
import re
import shlex

import streamlit as st

from twell import analysis
from twell.analysis.ablations.allocation import summary
from twell.analysis.ablations.by_condition import KEPT, of_clusters
from twell.analysis.figures.ablation.effects import (
    MOST,
    curve_rows,
    curve_sets,
    effect_by_density,
    layer_rows,
    loss_by_layer,
    loss_by_share,
    of_tokens,
    share_by_layer,
)
from twell.app.jobs.runner import model_of
from twell.app.jobs.status import job_status
from twell.app.jobs.study import draw_study, note_unfinished, study_button
from twell.app.ui import widgets
from twell.app.ui.formatting import number, plural, typeset_form, whole
from twell.app.ui.query import fetch, query
from twell.app.ui.url_state import current_run
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run

FORMS = {
    **dict.fromkeys(("change", "low", "high"), "{:+.5f}"),
    "kept": "{:.1%}",
    **dict.fromkeys(("silenced", "tokens", "documents"), "{:,.0f}"),
}  # of the columns of a table


def curves(run: Run) -> None:
    """Draw the loss against what is left: a figure for each set of tokens that it was measured on."""
    sets = curve_sets(fetch(run, curve_rows))
    for place, rows in enumerate(sets):
        result, others = query(run, curve_rows), ""
        if len(sets) > 1:
            result = result.then(of_tokens, place)
            others = f" Figure {place + 1} of {len(sets)}, each of other tokens, so that their points do not compare."
        number_of = f"-{place}" if place else ""  # in the keys
        first = rows.iloc[0]
        bars = "bars: 95 % by document" if rows["low"].notna().any() else "no bars, of too few documents for intervals"
        widgets.heading(
            "Loss by what is left",
            f"Change from {number(first['base'])} nats a token with nothing taken away; the same "
            f"{plural(int(first['tokens']), 'token')} of {of_clusters(int(first['documents']))} under every "
            f"condition; {bars}. Grey: the controls, taken away at random.{others}",
            result,
            key=f"loss-by-what-is-left{number_of}",
        )
        figure, alt = loss_by_share(rows), "Loss by the share of firings that is left"
        widgets.draw(figure, f"ablation-curves{number_of}", alt, wide=True)


def layers(run: Run) -> None:
    """Draw the loss without each layer's FFN."""
    rows = fetch(run, layer_rows)
    widgets.heading(
        "Without a layer's FFN",
        "The FFN of one layer puts out nothing; attention and all other layers run as they are. Left of 0 the loss is "
        "lower without it.",
        query(run, layer_rows),
    )
    widgets.draw(loss_by_layer(rows), "ablation-layers", "Loss without the FFN of each layer", wide=True)


def budget(run: Run) -> None:
    """Draw the shares of layers that fit a budget of loss together; nothing where none was divided."""
    if not (fetch(run, analysis.effects)["kind"] == "shares").any():
        return
    result = query(run, analysis.allocation)
    nats = result.frame.attrs["budget"]
    of = f"{number(nats)} nats a token. " if nats == nats else ""
    widgets.heading(
        "A budget of loss over the layers",
        f"{of}The share of each layer's hidden values that is set to 0, the smallest ones. {summary(result.frame)}",
        result,
    )
    widgets.draw(share_by_layer(result.frame), "ablation-budget", "Share of each layer within a budget", wide=True)


def neurons(run: Run) -> None:
    """Draw neurons by effect against density."""
    table = fetch(run, analysis.neuron_effects)
    about = table.attrs
    exact = f"; amber: {plural(about['measured'], 'neuron')} silenced one by one" if about["measured"] else ""
    agree = about["rank_correlation"]
    ranks = f", rank correlation with the estimates {agree:.2f}" if agree == agree else ""
    living = int((table["fires"] > 0).sum())
    drawn = f"the {whole(MOST)} of the greatest effect" if living > MOST else f"all {whole(living)} that fire"
    widgets.heading(
        "Neurons by effect",
        f"Gradient × activation, to first order, on {plural(about['tokens'], 'token')}; {drawn}{exact}{ranks}.",
        query(run, analysis.neuron_effects),
    )
    widgets.draw(effect_by_density(table), "ablation-neurons", "Effect of neurons by how often they fire", wide=True)


def every_condition(run: Run) -> None:
    """Draw the table of all conditions."""
    table = fetch(run, analysis.effects)
    widgets.heading("Every condition", f"As twell ablate spells them; {KEPT}.", query(run, analysis.effects))
    columns = table[["condition", "change", "low", "high", "kept", "silenced", "tokens", "documents"]]
    columns = columns.dropna(axis="columns", how="all")
    forms = {name: typeset_form(form) for name, form in FORMS.items() if name in columns}
    widgets.table(columns.style.format(forms, na_rep="–"), width="stretch")


def not_measured(run: Run) -> None:
    """Draw how to measure it, here or in a terminal, with the run's model or, where that is elsewhere, with another."""
    at_hand = model_of(run) is not None
    command = f"twell ablate {html.escape(shlex.quote(str(run.path)) if at_hand else 'MODEL --text FILE --out DIR')}"
    st.html(
        """<div class="tw-empty"><p>Counting says what fires; taking it away says what matters. Not measured yet: the
        loss with ever fewer firings, without each layer's FFN, and without the neurons that never fired.</p></div>"""
    )
    draw_study(run)
    tokens = '<code class="tw-option">--tokens</code>'
    said = f"In a terminal, on {whole(20_000)} tokens, {whole(500_000)} on a GPU, or as many as {tokens} says:"
    st.html(
        f"""<div class="tw-empty"><p>{said}</p><pre>{unbroken(command)}</pre>
        <p>And every neuron's effect, some of them exactly:</p><pre>{unbroken(command + " --neurons 64")}</pre></div>"""
    )
    if at_hand and run.has("examples"):
        widgets.page_link("neurons", "One neuron at a time, at once: choose it, then “What if it were zero?” →")


def unbroken(markup: str) -> str:
    """Return HTML in which no line ends within an option of a command, as it would after the hyphens of one."""
    return re.sub(r"(?<=\s)--[a-z-]+", r'<span class="tw-option">\g<0></span>', markup)


def what_is_missing(sentences: list[str]) -> None:
    """Draw what was not measured, each with the command that would."""
    marked = (unbroken(re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(sentence))) for sentence in sentences)
    st.html(f'<div class="tw-empty">{"".join(f"<p>{sentence}</p>" for sentence in marked)}</div>')


run = current_run()
measured = run.has("effects") or run.has("neuron_effects")
with st.container(horizontal=True, vertical_alignment="center"):
    widgets.title("What matters to the loss?")
    if measured:
        study_button(run)
job_status()
if measured:
    note_unfinished(run)
    missing: list[str] = []
    for draw in (curves, layers, budget, neurons, every_condition):
        with widgets.show_errors():
            try:
                draw(run)
            except Missing as error:  # said once what was measured stands there
                missing.append(str(error))
    if missing:
        what_is_missing(missing)
else:
    not_measured(run)
