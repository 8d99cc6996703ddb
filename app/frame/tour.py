"""The tour of a first visit: five steps under the bar, each of which marks the part of the bar that it is about.

It begins on the front page, stays while other pages are opened, and can be left at any step. That it was left or ended
is kept in a file of the user's cache folder, so it does not come back; nothing is kept of what was looked at.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import streamlit as st

from twell.workbench.errors import UserError
from twell.workbench.run.homes.cache_home import cache_home

STEP, ENDED = "tour-step", "tour-ended"  # keys of the session
STEPS = (  # the part of the bar, by its class, and what is said of it
    (
        "st-key-group-0",
        "In each layer a token fires some of the model's neurons, and the others stay silent. How many it fires is "
        "called <b>nnz</b>. Overview sums up one run: one model on one text.",
    ),
    (
        "st-key-group-1",
        "<b>What fires</b>: the text, shaded by it; then tokens, layers, positions and neurons. Every token and every "
        "neuron has a page of its own.",
    ),
    (
        "st-key-group-2",
        "<b>What it buys</b>: how much faster the model runs here when silent neurons are skipped, layer by layer.",
    ),
    (
        "st-key-group-3",
        "<b>What is claimed</b>: published findings, each tested on this run, and this run beside another one.",
    ),
    (
        "st-key-group-4",
        "<b>Take it along</b>: Data and Code stand beside every figure, and Export has a notebook, one page and all "
        "tables. The field with the lens finds a token, a neuron such as L3/N42, or words of the text.",
    ),
)


def marker() -> Path:
    """Return the file that says that the tour has been seen."""
    return cache_home() / "tour-seen"


def _was_seen() -> bool:
    """Return whether the tour was seen; false where a home that is missing or not to be read cannot tell."""
    with suppress(OSError, UserError):
        return marker().exists()
    return False


def draw_tour(is_front: bool) -> None:
    """Draw the step of the tour that the visitor is at; nothing once it was seen, and before it begins elsewhere.

    is_front: whether the page is the front page
    """
    if st.session_state.get(ENDED) or not (is_front or STEP in st.session_state):
        return
    if STEP not in st.session_state and _was_seen():
        st.session_state[ENDED] = True
        return
    step = st.session_state.setdefault(STEP, 0)
    part, text = STEPS[step]
    last = step == len(STEPS) - 1
    st.html(f"<style>.stApp .{part} {{ box-shadow: inset 0 -3px #2f7ed8; }}</style>")
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="tour"):
        st.html(f'<p class="tw-said">{step + 1} of {len(STEPS)} · {text}</p>', width="stretch")
        if not last:
            st.button("Next", key="tour-next", on_click=_go_on)
        st.button("Done" if last else "Leave the tour", key="tour-leave", on_click=_leave, type="tertiary")


def _go_on() -> None:
    st.session_state[STEP] += 1


def _leave() -> None:
    st.session_state[ENDED] = True
    with suppress(OSError, UserError):  # a home that cannot be written to sees it in the next session again
        marker().parent.mkdir(parents=True, exist_ok=True)
        marker().touch()
