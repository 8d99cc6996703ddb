"""What is worth a look in a run: a sentence for each thing that stands out, computed, with the page that shows it.

A sentence is HTML and safe: every token in it has gone through `token_html`. What a run lacks is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from twell import analysis
from twell.app.activity.layer_data import CORRELATION
from twell.app.ui.formatting import SPACE, fixed, number, percent, plural, times, token_html, whole
from twell.app.ui.query import fetch
from twell.app.ui.url_state import link
from twell.workbench.errors import Missing
from twell.workbench.run.store import Run


@dataclass(frozen=True)
class Finding:
    """One sentence, as HTML, and the page that shows what it is about."""

    page: str
    sentence: str


def findings(run: Run) -> list[Finding]:
    """The sentences for a run, in the order of the pages."""
    found: list[Finding] = []
    for page, look in LOOKS:
        try:
            sentence = look(run)
        except Missing:
            continue
        if sentence:
            found.append(Finding(page, sentence))
    return found


def _tokens(run: Run) -> str:
    frame = fetch(run, analysis.by_token)
    sure = frame.dropna(subset=["z_se"])
    if len(sure) < 4:
        return ""

    def named(rows: pd.DataFrame) -> str:
        return ", ".join(
            f'<a href="{link("token", token=r.token_id)}">{token_html(r.text)}</a> ({fixed(r.z)})'
            for r in rows.itertuples()
        )

    return (
        f"Loudest of the {plural(len(frame), 'token')} seen at least 20 times: {named(sure.head(3))}. "
        f"Quietest: {named(sure.tail(3)[::-1])}. In standard deviations from the layers' means."
    )


def _layers(run: Run) -> str:
    frame = fetch(run, analysis.by_layer)
    high, low = frame.loc[frame["mean"].idxmax()], frame.loc[frame["mean"].idxmin()]
    return (
        f"Layer {high['layer']:.0f} fires the most neurons, {number(high['mean'])} a token, and carries "
        f"{percent(high['share'])} of the model's nnz; layer {low['layer']:.0f} fires the fewest, "
        f"{number(low['mean'])}."
    )


def _dead(run: Run) -> str:
    frame = fetch(run, analysis.by_layer)
    if "dead_share" not in frame or not frame["dead_share"].notna().any():
        return ""
    worst = frame.loc[frame["dead_share"].idxmax()]
    if worst["dead"] == 0:
        return f"Every neuron fired at least once in {whole(worst['tokens'])} tokens."
    return (
        f"In layer {worst['layer']:.0f}, {percent(worst['dead_share'])} of the neurons never fired in "
        f"{whole(worst['tokens'])} tokens of {plural(run.manifest.sequences, 'sequence')}."
    )


def _positions(run: Run) -> str:
    frame = fetch(run, analysis.by_position)
    first = frame[frame["first"]].set_index("layer")["mean"]
    later = frame[~frame["first"]]
    if not len(first) or not len(later):
        return ""
    weighted = (later["mean"] * later["tokens"]).groupby(later["layer"]).sum() / later.groupby("layer")["tokens"].sum()
    ratio = (first / weighted).replace(float("inf"), float("nan")).dropna()
    if not len(ratio):
        return ""
    return (
        f"The first position of a sequence fires {number(ratio.min(), 2)} to {number(ratio.max(), 2)}{SPACE}× the "
        f"neurons of later ones, by layer (median {number(ratio.median(), 2)}{SPACE}×)."
    )


def _surprisal(run: Run) -> str:
    frame = fetch(run, CORRELATION)
    strongest = frame.loc[frame["spearman"].abs().idxmax()]
    low, high = fixed(strongest["low"]), fixed(strongest["high"])
    interval = f"95{SPACE}% {low} to {high}, " if pd.notna(strongest["low"]) else ""  # one sequence tells none
    return (
        f"nnz against the loss of the next token: Spearman {fixed(frame['spearman'].min())} to "
        f"{fixed(frame['spearman'].max())} by layer, strongest in layer {strongest['layer']:.0f} "
        f"({interval}n = {whole(strongest['n'])})."
    )


def _kernels(run: Run) -> str:
    frame = fetch(run, analysis.speedup)
    if (frame["kernel"] == "reference").all():
        return (
            "The sparse timings are the reference kernel's, an oracle and not meant to be fast: no speedup is claimed."
        )
    best, worst = frame.loc[frame["speedup"].idxmax()], frame.loc[frame["speedup"].idxmin()]
    return (
        f"Sparse against dense, layer {best['layer']:.0f} gains most, {times(best['speedup'])} at a mean nnz of "
        f"{number(best['nnz_mean'])} in the timed batches; layer {worst['layer']:.0f} least, "
        f"{times(worst['speedup'])} at {number(worst['nnz_mean'])}."
    )


def _verified(run: Run) -> str:
    parity = run.manifest.parity
    if not parity or not {"same_choice", "tokens", "counts", "differing", "beyond_rounding"} <= set(parity):
        return ""
    beyond = parity["beyond_rounding"]
    rounding = "none by more than rounding" if not beyond else f"{whole(beyond)} by more than rounding"
    differ = f"{whole(parity['differing'])} of {plural(parity['counts'], 'count')} differ"
    return (
        f"Verified against dense: the same next token for {percent(parity['same_choice'])} of "
        f"{plural(parity['tokens'], 'token')}; {differ}{', ' + rounding if parity['differing'] else ''}."
    )


def _watched(run: Run) -> str:
    overhead = run.manifest.overhead or {}
    said = {"counts": "counts", "neurons": "neuron sums too", "all": "everything"}
    cost = [f"{times(overhead[f'{k}_over_none'])} with {v}" for k, v in said.items() if f"{k}_over_none" in overhead]
    return f"Time of a watched pass over that of an unwatched one: {', '.join(cost)}." if cost else ""


LOOKS: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("tokens", _tokens),
    ("layers", _layers),
    ("layers", _dead),
    ("layers", _surprisal),
    ("positions", _positions),
    ("kernels", _kernels),
    ("kernels", _verified),
    ("kernels", _watched),
)
