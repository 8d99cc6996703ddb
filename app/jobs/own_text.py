"""The user's own text on the Text page: a field to write it in, and the capture that makes a run of it."""

from __future__ import annotations

import re
import time

import streamlit as st

from twell.app.jobs.runner import OWN, model_of
from twell.app.jobs.status import (
    OWN_TEXT,
    fresh_key,
    is_busy,
    model_arguments,
    note_if_busy,
    note_model_missing,
    start_job,
)
from twell.app.ui import widgets
from twell.app.ui.formatting import whole
from twell.app.ui.run_catalog import runs_folder
from twell.app.ui.url_state import sync_url
from twell.workbench.run.store import Run

LONGEST = 20_000  # characters of own text


def own_text(run: Run) -> None:
    """Draw the button under which the user writes a text, and captures it with the run's model."""
    with st.popover("Your own text", key=fresh_key("own")):
        model = model_of(run)
        if model is None:
            note_model_missing()
            return
        widgets.note(
            f"Runs this run's model on up to {whole(LONGEST)} characters of your text, in a separate process on this "
            "machine. The result is a run like the others.",
            width=520,
        )
        with st.form(fresh_key("own-form"), border=False):
            text = st.text_area("Text", key="own-words", height=180, width=520)
            submitted = st.form_submit_button(
                "Capture text", type="primary", key="own-start", disabled=is_busy(), on_click=sync_url
            )
        note_if_busy()
        if not submitted:
            return
        if not text.strip():
            st.info("Write some words first.")
        elif len(text) > LONGEST:
            st.info(f"The text has {whole(len(text))} characters: shorten it to {whole(LONGEST)}.")
        else:
            _capture(model, text)


def _capture(model: tuple[str, str | None], text: str) -> None:
    """Start the capture of the text with a model; the run is named after the text's first words."""
    slug = "-".join(re.findall(r"[a-z0-9]+", text.lower())[:4])[:32]
    stamp = time.strftime("%m%d-%H%M%S")
    name = "-".join(word for word in ("own", slug, stamp) if word)
    arguments = ["capture", *model_arguments(model), "--text", OWN, "--timings", "0"]
    start_job(OWN_TEXT, runs_folder().resolve() / name, name, arguments, text=text)
