"""The user's own text on the Text page: a field to write it in, the reading of it, and saving that as a run."""

from __future__ import annotations

import re
import time
from typing import Any

import streamlit as st

from twell.app.jobs.asking import begin, model_request, result_of, worker
from twell.app.jobs.status import is_busy, note_if_busy, note_model_missing
from twell.app.jobs.worker import save_reading
from twell.app.ui import widgets
from twell.app.ui.formatting import message_markdown, whole
from twell.app.ui.run_catalog import runs_folder
from twell.app.ui.url_state import link, open_page, parameter, url_param
from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run

LONGEST = 20_000  # characters of own text
MOST_GENERATED = 256  # tokens
FROM_LINE = ("own", "sequence", "position", "to", "from", "write")  # parameters of the address that a new text replaces


def own_text_link(run: Run) -> str:
    """Return a link to page Text with the field for the user's own text open, as HTML; empty if the model is not at
    hand."""
    if model_request(run) is None:
        return ""
    return f'<a class="tw-chip" href="{link("text", write=True)}">Try your own text →</a>'


def own_text_button(run: Run) -> None:
    """Draw the button under which the user writes a text, which the run's model then reads; the address says whether
    the field is open."""
    with st.popover("Your own text", **url_param("write", False, {"True": True}.get)) as popover:
        request = model_request(run)
        if request is None:
            note_model_missing()
            return
        if popover.open and not is_busy():
            worker().prepare()  # while the text is written
        widgets.note(
            f"Runs this run's model on up to {whole(LONGEST)} characters of your text, on this machine. Nothing is "
            "saved unless you save it.",
            width=520,
        )
        with st.form("own-form", border=False):
            text = st.text_area("Text", key="own-words", height=180, width=520)
            with st.container(horizontal=True, vertical_alignment="bottom"):
                generate = st.number_input(
                    "Continue it by", 0, MOST_GENERATED, step=16, key="own-generate", width=230, help="tokens"
                )
                temperature = st.number_input(
                    "Temperature",
                    0.0,
                    5.0,
                    step=0.1,
                    key="own-temperature",
                    width=150,
                    help="0: always the most likely token",
                )
                submitted = st.form_submit_button("Read it", type="primary", key="own-start", disabled=is_busy())
        note_if_busy()
        if submitted:
            _submit(request, text, int(generate), float(temperature))


def _submit(request: dict[str, Any], text: str, generate: int, temperature: float) -> None:
    """Have the worker read a text, and go to the address of what it reads; or say why it cannot be read."""
    if not text.strip():
        st.info("Write some words first.")
        return
    if len(text) > LONGEST:
        st.info(f"The text has {whole(len(text))} characters: shorten it to {whole(LONGEST)}.")
        return
    continuation = {"generate": generate, "temperature": temperature} if generate else {}
    try:
        reading = begin({**request, "text": text, **continuation})
    except UserError as error:
        st.warning(message_markdown(str(error)))
        return
    kept = {name: value for name, value in st.query_params.items() if name not in FROM_LINE}
    open_page("text", **kept, own=reading.key)


def own_reading() -> Run | None:
    """Return the run of the own text that the address names, or None; draw the progress of one that is being read.

    Raises UserError if it could not be read, or is not there any more.
    """
    key = parameter("own")
    if key is None:
        return None
    reading = worker().find(key)
    if reading is None:
        raise UserError(
            "Expected a text that was read since the dashboard was started, this one is gone, as nothing is saved "
            "unless you save it: write it again."
        )
    return result_of(reading)


def own_actions(own: Run) -> None:
    """Draw the buttons of an own text: save it as a run, and go back to the texts of the run that is shown."""
    with st.container(horizontal=True, vertical_alignment="center", gap="medium", key="own-actions"):
        if st.button("Save as a run", key="own-save"):
            _save(own)
        if st.button("Back to the run's text", key="own-close", type="tertiary"):
            open_page("text", **{name: value for name, value in st.query_params.items() if name not in FROM_LINE})


def _save(own: Run) -> None:
    """Save an own text as a run named after its first words, and open it on the scale of the run that was shown."""
    folder = runs_folder().resolve()
    if (folder / manifests.FILE).exists():
        st.info("The dashboard was started on a single run. To add another, start it on a folder of runs.")
        return
    text = own.decode(own.frame("activity", ["token_id"])["token_id"].head(12).tolist())
    slug = "-".join(re.findall(r"[a-z0-9]+", text.lower())[:4])[:32]
    name = "-".join(word for word in ("own", slug, time.strftime("%m%d-%H%M%S")) if word)
    try:
        save_reading(own, folder / name)
    except UserError as error:
        st.warning(message_markdown(str(error)))
        return
    scale = parameter("scale") or st.session_state["run"]  # on its own, a few words look as active as any text
    open_page("text", run=name, scale=scale)
