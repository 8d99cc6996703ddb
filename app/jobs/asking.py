"""Asking the worker from a page: what to ask it for, waiting for it, and the readings that addresses name."""

from __future__ import annotations

import html
import importlib.util
from collections.abc import Sequence
from typing import Any

import streamlit as st

from twell.analysis.passage import passage
from twell.app.jobs.runner import model_of
from twell.app.jobs.status import is_busy
from twell.app.jobs.worker import Reading, WorkerProcess
from twell.app.ui import widgets
from twell.app.ui.query import fetch
from twell.app.ui.run_cache import cached_run
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run

INTERVAL = 0.5  # seconds between two versions of the line that says what the worker is at
AT_ONCE = 0.4  # seconds in which a reading that is quick shows no such line


@st.cache_resource(show_spinner=False)
def worker() -> WorkerProcess:
    """Return the worker that all visitors of this server share."""
    return WorkerProcess()


def model_request(run: Run) -> dict[str, Any] | None:
    """Return the fields of a request that say which model reads, the one of this run; None if it is not at hand."""
    model = model_of(run)
    if model is None:
        return None
    folder, revision = model
    return {
        "model": folder,
        "revision": revision,
        "threshold": run.manifest.options.get("threshold"),
        "weights": run.manifest.model.get("weights"),
    }


def names_neurons(run: Run) -> bool:
    """Return whether the neurons that a token of the text fires can be told: the run keeps them, or its model reads."""
    return run.has("fired") or (run.has("activity") and model_request(run) is not None)


def prepare() -> None:
    """Start the worker in the background, as the next click may ask it; not beside a measurement, nor without torch."""
    if st.runtime.exists() and not is_busy() and importlib.util.find_spec("torch") is not None:
        worker().prepare()


def passage_anew(run: Run, sequence: int, silent: tuple[int, int] | None = None) -> Run | None:
    """Return a run of one sequence of a run, read now by its model, its firings kept; None if no model is at hand.

    It is sequence 0 there. Draws a line while it waits. Raises UserError if the model cannot read it. silent: layer and
    index of a neuron that is zero meanwhile.
    """
    request = model_request(run)
    if request is None:
        return None
    ids = fetch(run, passage, sequence=sequence)["token_id"].tolist()
    return result_of(begin({**request, "ids": ids, **({"silent": [silent]} if silent else {})}))


def passages_anew(run: Run, sequences: Sequence[int]) -> list[Run]:
    """Return a run of each of these sequences, as `passage_anew` does; none if no model is at hand."""
    request = model_request(run)
    if request is None:
        return []
    texts = [fetch(run, passage, sequence=sequence)["token_id"].tolist() for sequence in sequences]
    return [result_of(reading) for reading in [begin({**request, "ids": ids}) for ids in texts]]


def begin(request: dict[str, Any]) -> Reading:
    """Have the worker read. Raises UserError if it cannot, or if a measurement is running, which it would falsify."""
    if is_busy():
        raise UserError(
            "Expected no measurement while the model reads, one is running: wait until it ends, or stop it."
        )
    return worker().ask(request)


def result_of(reading: Reading) -> Run:
    """Return the run of a reading once it has ended, as `wait_for` waits. Raises UserError if there is none."""
    wait_for(reading)
    try:
        return cached_run(reading.run())
    except OSError as error:
        raise UserError(f"Expected what the model has read in its folder, got {error.strerror}: ask again.") from None


def wait_for(reading: Reading) -> None:
    """Wait until a reading has ended; until then draw what the worker is at, and a button to stop it.

    Raises UserError with the reason if it failed.
    """
    if not reading.done.wait(AT_ONCE):
        area = st.empty()
        with area.container(horizontal=True, vertical_alignment="center", gap="medium", key=f"reading-{reading.key}"):
            line = st.empty()
            st.button("Stop", key=f"stop-{reading.key}", on_click=worker().stop, args=(reading,))
        while not reading.done.wait(INTERVAL):  # drawing the line ends this script if the visitor has gone on
            state = html.escape(worker().state or "waiting")
            line.html(f'<p class="tw-note"><span class="tw-mark live">{state}, {reading.seconds:.0f} s</span></p>')
        area.empty()
    if reading.error:
        raise UserError(reading.error)
    if reading.note:
        widgets.note(html.escape(reading.note))
