"""Measuring what matters from the page of that name: on how many tokens, how long it takes, and the `twell ablate`."""

from __future__ import annotations

import html
import os
import shlex

import streamlit as st

from twell.app.jobs.asking import worker
from twell.app.jobs.runner import model_of, require_torch
from twell.app.jobs.status import INTERVAL, STUDY, fresh_key, is_busy, note_if_busy, note_model_missing, start_job
from twell.app.ui import widgets
from twell.app.ui.formatting import marked_up, plural, whole
from twell.app.ui.run_catalog import RECORDED
from twell.app.ui.url_state import redraw_page, run_name
from twell.workbench.errors import UserError
from twell.workbench.run.manifest import RECORDING
from twell.workbench.run.store import Run

TOKENS = (2_000, 8_000, 20_000, 100_000)  # to choose from
BATCH_TOKENS = 1024  # of a batch: few, as the progress and what a stopped study keeps go by batches
AT_MOST = 120.0  # seconds that the choice offered first takes
START = 8.0  # seconds in which a process loads torch and the model
OVER_ALL_LAYERS = {True: 11, False: 22}  # conditions of `twell ablate`, by whether the run counts by a threshold


def study_button(run: Run) -> None:
    """Draw the button under which a study is started, on a page that shows one already."""
    with st.popover("Measure now", key=fresh_key("study")):
        draw_study(run)
        if model_of(run) is not None and not refusal(run):
            command = html.escape(shlex.join(["twell", "ablate", str(run.path)]))
            widgets.note(f"On more tokens, or other conditions, in a terminal: <code>{command}</code>", width=640)


def draw_study(run: Run) -> None:
    """Draw the choice of tokens, how long it will take, and the button that starts it; or why it cannot be started."""
    if model_of(run) is None:
        note_model_missing()
        return
    if reason := refusal(run):
        widgets.note(marked_up(reason), width=640)
        return
    choices = [tokens for tokens in TOKENS if tokens < run.manifest.tokens] or [run.manifest.tokens]
    quick = [tokens for tokens in choices if seconds(run, tokens) <= AT_MOST]
    tokens = st.segmented_control(
        "Tokens of this run to measure on",
        choices,
        format_func=whole,
        default=(quick or choices)[-1 if quick else 0],
        required=True,
        key="study-tokens",
    )
    widgets.note(html.escape(about(run, int(tokens or choices[0]))), width=640)
    waits = worker().busy
    st.fragment(_start, run_every=INTERVAL if waits else None)(run, int(tokens or choices[0]), waits)


def _start(run: Run, tokens: int, waits: bool) -> None:
    """Draw the button that starts a study. waits: whether the model was reading when it was drawn first, and the button
    is off until that is done."""
    reading = worker().busy
    if waits and not reading:
        redraw_page()
    if st.button("Measure", type="primary", key="study-start", disabled=is_busy() or reading):
        start_job(STUDY, run.path.resolve(), run_name(), study_arguments(run, tokens), cases=0, page="matters")
    note_if_busy()
    if reading:
        widgets.note("The model is reading a text, or getting ready to. Wait until it is done: both would be slower.")


def study_arguments(run: Run, tokens: int) -> list[str]:
    """Return the arguments of `twell ablate` that measures a run on so many of its tokens."""
    return ["ablate", str(run.path.resolve()), "--tokens", str(tokens), "--batch-tokens", str(BATCH_TOKENS)]


def refusal(run: Run) -> str:
    """Return why the run cannot be measured from its page, in a sentence; "" if it can, or lacks its model alone."""
    try:
        require_torch()
    except UserError as error:
        return str(error)
    if run.manifest.status == RECORDING:
        return "This run is still being recorded. You can measure it once the capture has ended."
    if str(st.session_state.get("run", "")).startswith(RECORDED):
        return "This run came with the package, which stays as it is. Measure a copy of it, or a run of your own."
    if run.manifest.summary_only or not run.has("activity"):
        return "This run keeps no rows of single tokens, so there is nothing to measure it on: capture its model again."
    if not os.access(run.path, os.W_OK):
        return f"Expected a run that can be written to, got {run.path}: copy it to a folder of yours."
    return ""


def seconds(run: Run, tokens: int) -> float:
    """Return about how long a study takes, in seconds, by the tokens a second of the run's capture.

    A condition is a pass over the tokens; one of a single layer begins there, so that all of these take half each.
    """
    passes = 1 + OVER_ALL_LAYERS[run.counts_above_threshold] + run.layers / 2
    return START + tokens * passes * run.manifest.seconds / max(run.manifest.tokens, 1)


def about(run: Run, tokens: int) -> str:
    """Return what a study measures, and about how long that takes, in sentences."""
    conditions = OVER_ALL_LAYERS[run.counts_above_threshold] + run.layers
    rate = run.manifest.tokens / max(run.manifest.seconds, 1e-9)
    return (
        f"Runs the model on {plural(tokens, 'token')} from all over this run's text, as it is and under some "
        f"{conditions} conditions, in a separate process on this machine: {in_words(seconds(run, tokens))} at the "
        f"{whole(rate)} tokens a second of this run's capture ({run.manifest.device}). Figures appear here as it goes, "
        "and are saved with the run. More tokens make the intervals narrower."
    )


def in_words(seconds: float) -> str:
    """Return a time in words, to ten seconds, minutes or hours."""
    if seconds < 95:
        return f"about {max(10, round(seconds / 10) * 10)} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.0f} h"


def note_unfinished(run: Run) -> None:
    """Draw a note that the study measured last was stopped, and how to go on; nothing if it ended or is running."""
    last = run.manifest.effects[-1] if run.manifest.effects else None
    if last and not last.get("complete", True) and not is_busy():
        here = " Measure on as many tokens again, and it goes on from there."
        widgets.note(
            f"The last study was stopped before all of its {plural(last['tokens'], 'token')} were measured; its "
            f"figures are of those that were.{here if last.get('batch_tokens') == BATCH_TOKENS else ''}"
        )
