"""The header of every page about its run: the facts, the definition of nnz, and the state of an unfinished run."""

from __future__ import annotations

import html
import time
from pathlib import Path

import streamlit as st

from twell import analysis
from twell.app.ui import widgets
from twell.app.ui.formatting import SPACE, layer_width, plural, seconds_ago, whole
from twell.app.ui.run_cache import digest, open_cached
from twell.app.ui.url_state import redraw_page
from twell.workbench.errors import Missing, UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run

INTERVAL = 1.0  # seconds between two looks at a run that is being recorded; a look may come in a click's way
SILENT = 60.0  # seconds without a new part after which the capture may have died; a part closes after 10


def facts(run: Run) -> None:
    """Draw the line that says which model was run, on what, and how."""
    manifest = run.manifest
    texts = [
        f"{plural(run.layers, 'layer')} × {whole(manifest.model['d_model'])}, d_ff {layer_width(run)}",
        "training"
        if manifest.training
        else f"{plural(manifest.tokens, 'token')} in {plural(manifest.sequences, 'sequence')}",
        f"{manifest.dtype} on {manifest.device}",
        f"{manifest.kernel['name']} kernel",
    ]
    model = f"<b>{html.escape(str(manifest.model['name']))}</b>"
    spans = "".join(f"<span>{html.escape(text)}</span>" for text in texts)
    st.html(f'<div class="tw-head">{model}{spans}</div>', width="stretch")


def definition(run: Run) -> None:
    """Draw the button that explains nnz, by the rule of this run, and the terms that rest on it."""
    with st.popover("What is nnz?", type="tertiary", key="definition"):
        terms = {
            "nnz": f"the number of a layer's {layer_width(run)} FFN neurons that a token fires. In this run, a neuron "
            f"fires when: {run.manifest.nnz_definition.rstrip('.')}.",
            "FFN": "the feed-forward part of a layer, where its neurons are; the other part is attention.",
            "sparsity": "1 − mean nnz / d_ff, where d_ff is the number of neurons of a layer.",
            "density": "of a neuron: the share of tokens that fire it.",
            "loss": "of a token: how badly the model predicted it, −log of the probability that it gave it, in nats.",
            "z": "how many standard deviations a token's nnz lies from the layer's mean, averaged over the layers.",
            "dead": "of a neuron: it never fired on this text. It may still fire on other text: its density is below "
            f"3 / tokens with 95{SPACE}% confidence if tokens are independent.",
            "not counted": "special tokens, the first token of each sequence, and tokens with a non-finite value. "
            "First tokens appear only where the first position is shown separately.",
        }
        st.html(widgets.facts_html(terms))


def status(run: Run) -> None:
    """Draw a note about what an unfinished or summary-only run lacks."""
    if run.manifest.status == "recording":
        _follow(str(run.path), digest(run))
    elif run.manifest.status == "interrupted":
        covered = "steps" if run.manifest.training else plural(run.manifest.tokens, "token")
        what = "training" if run.manifest.training else "capture"
        widgets.note(
            f'<span class="tw-mark">interrupted</span> The {what} stopped before its end. This page covers only the '
            f"{covered} recorded until then."
        )
    left_out(run)
    if run.manifest.summary_only:
        widgets.note(
            '<span class="tw-mark">summary only</span> This run keeps sums, counts and timings, but no rows of single '
            "tokens, so it cannot show where a token occurs in the text."
        )


def left_out(run: Run) -> None:
    """Draw a note that names the damaged parts which a run is shown without, if there are any."""
    if run.left_out:
        widgets.note(f'<span class="tw-mark">damaged</span> {html.escape(run.name)}: {html.escape(run.left_out)}')


@st.fragment(run_every=INTERVAL)
def _follow(path: str, drawn_digest: str) -> None:
    """Look at a run that is being recorded, and draw the page again once it has a new part.

    Args:
        path: the run's folder.
        drawn_digest: the digest of the run as the page shows it.
    """
    try:
        run = open_cached(Path(path))
        age = time.time() - (Path(path) / manifests.FILE).stat().st_mtime
    except (UserError, OSError):
        redraw_page()
    if digest(run) != drawn_digest:
        redraw_page()
    if age > SILENT:
        text = f"last part {seconds_ago(age)}. The capture may have been killed; this is what it wrote."
        mark = '<span class="tw-mark">recording</span>'
    else:
        text = f"last part {seconds_ago(age)}. The page updates by itself."
        mark = '<span class="tw-mark live">recording</span>'
    progress = "" if run.manifest.training else f"{plural(run.manifest.tokens, 'token')} so far, "
    widgets.note(f"{mark} {progress}{text}")


def update_summaries(run: Run) -> None:
    """Bring the run's summaries up to date, with a progress bar if that takes longer than half a second."""
    bar, done, began = st.empty(), 0, time.monotonic()

    def on_progress(tokens: int) -> None:
        nonlocal done
        done += tokens
        if time.monotonic() - began > 0.5:
            share = min(done / max(run.manifest.tokens, 1), 1.0)
            bar.progress(share, f"Summarising {plural(run.manifest.tokens, 'token')}, once for this run")

    try:
        analysis.ensure(run, on_progress)
    except Missing:
        pass  # each figure says what it lacks
    finally:
        bar.empty()
