"""Compare: this run beside another, number by number and layer by layer."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import pandas as pd
import streamlit as st

from twell.app import parts
from twell.app.compare_figures import side_by_side
from twell.app.state import Shelf, ask, bound, shelf, shown
from twell.app.words import number, percent, plural, signed, times, token_html, whole
from twell.workbench.errors import Missing
from twell.workbench.store import Run

NUMBERS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("Tokens", "tokens", lambda v: whole(v) if v is not None else "–"),
    ("Sparsity", "sparsity", percent),
    ("nnz per token and layer", "nnz_mean", number),
    ("Next-token loss, nats", "loss", number),
    ("Dead neurons", "dead_share", percent),
    ("FFN speedup", "speedup", times),
)
LEAST = 20  # times a token stands in both runs
MOVED = 12  # tokens that are listed


def other_run(run: Run, found: Shelf) -> Run | None:
    """The run to compare with, carried by the address."""
    here = str(st.session_state["run"])
    names = [name for name, other in found.runs.items() if name != here and other.manifest.tokens]
    if not names:
        return None
    tie = bound("with", names[0], lambda text: text if text in names else None)
    name = st.selectbox("Beside", names, format_func=lambda n: parts.run_label(n, found), width=320, **tie)
    return found.runs[str(name)]


def headline(runs: tuple[Run, Run]) -> None:
    """The numbers that runs are known by, and what differs in what was run."""
    answers = [ask(run, "overview") for run in runs]
    facts = {
        "model": [str(run.manifest.model["name"]) for run in runs],
        "layers × d_ff": [f"{run.layers} × {whole(run.d_ff)}" for run in runs],
        "text": [", ".join(str(t.get("source", "?")) for t in run.manifest.text) for run in runs],
        "kernel, device": [f"{r.manifest.kernel['name']}, {r.manifest.device}, {r.manifest.dtype}" for r in runs],
    }
    rows = [(name, *values) for name, values in facts.items()]
    rows += [(name, *(show(answer[key]) for answer in answers)) for name, key, show in NUMBERS]
    head = "".join(f"<span>{html.escape(run.name)}</span>" for run in runs)
    body = "".join(
        f"<div><span>{html.escape(name)}</span><span>{html.escape(a)}</span><span>{html.escape(b)}</span></div>"
        for name, a, b in rows
    )
    st.html(f'<div class="tw-two"><div class="names"><span></span>{head}</div>{body}</div>')
    if len({run.manifest.nnz_definition for run in runs}) > 1:
        st.warning("The two runs count nnz by different rules: see “What is nnz?” of each before comparing them.")


def by_layer(runs: tuple[Run, Run]) -> None:
    """Layer by layer."""
    frames = [ask(run, "by_layer").assign(run=place, name=run.name) for place, run in enumerate(runs)]
    frame = pd.concat(frames, ignore_index=True)
    measures = {"mean": "mean nnz", "sparsity": "sparsity"}
    if frame["dead_share"].notna().all():
        measures |= {"dead_share": "share of dead neurons"}
    parts.heading(
        "Layer by layer",
        f"Full: {runs[0].name}; open: {runs[1].name}. Dead neurons depend on how much text was read.",
        frame,
        runs[0],
        f"other = open_run({str(runs[1].path)!r})\nanalysis.by_layer(run), analysis.by_layer(other)",
    )
    parts.draw(side_by_side(frame, measures), "layers", "Both runs by layer")


def moved(runs: tuple[Run, Run]) -> None:
    """Tokens whose place in the ranking differs most, where both runs have one vocabulary."""
    if runs[0].manifest.tokenizer != runs[1].manifest.tokenizer:
        raise Missing("The two runs have different vocabularies, so their tokens cannot be compared one by one.")
    first, second = (ask(run, "by_token", min_count=LEAST) for run in runs)
    both = first.merge(second, on=["token_id", "text"], suffixes=("", "_other"))
    if both.empty:
        raise Missing(f"No token stands {LEAST} times in both runs.")
    both["moved"] = both["z_other"] - both["z"]
    both["moved_se"] = (both["z_se"] ** 2 + both["z_se_other"] ** 2) ** 0.5
    both = both[["token_id", "text", "z", "z_se", "z_other", "z_se_other", "moved", "moved_se"]]
    rank = float(both["z"].rank().corr(both["z_other"].rank())) if len(both) > 2 else float("nan")
    far = both.loc[both["moved"].abs().sort_values(ascending=False).index].head(MOVED)
    parts.heading(
        "Tokens that moved most",
        f"Of {plural(len(both), 'token')} seen at least {LEAST} times in both; Spearman of their z: {signed(rank, 2)}.",
        both,
        runs[0],
        f"other = open_run({str(runs[1].path)!r})\n"
        'analysis.by_token(run).merge(analysis.by_token(other), on="token_id")',
    )
    lines = "".join(
        f"<div><span>{token_html(r.text)}</span><span>{signed(r.z, 2)}</span><span>{signed(r.z_other, 2)}</span>"
        f"<span>{signed(r.moved, 2)} ± {number(1.96 * r.moved_se, 2)}</span></div>"
        for r in far.itertuples()
    )
    names = [html.escape(run.name) for run in runs]
    head = (
        f'<div class="names"><span></span><span>z, {names[0]}</span><span>z, {names[1]}</span><span>moved</span></div>'
    )
    st.html(f'<div class="tw-two four">{head}{lines}</div>')


def page(run: Run) -> None:
    """The two runs side by side."""
    other = other_run(run, shelf())
    if other is None:
        st.info("There is no other run here to compare with: record one, or read a text of your own on the Text page.")
        return
    runs = (run, other)
    parts.summarise(other)
    headline(runs)
    with parts.told():
        by_layer(runs)
    with parts.told():
        moved(runs)


parts.title("How does it differ from another run?")
with parts.told():
    page(shown())
