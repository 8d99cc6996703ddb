"""What is said where there is nothing to show: no run, none of that name, one that cannot be read."""

from __future__ import annotations

import html

import streamlit as st

from twell.app.ui import widgets
from twell.app.ui.formatting import plural
from twell.app.ui.url_state import Shelf, draw_anew, shelf
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run

LOOK = 2.0  # seconds between looks for a run that is not there


def no_runs(found: Shelf) -> None:
    """The page of a folder that holds no run."""
    folder = html.escape(str(found.folder))
    st.html(
        f"""<div class="tw-empty"><h1 class="tw-title">No runs yet</h1>
        <p>A run is what <code>twell capture</code> writes: which neurons each token of a text fired, layer by layer.
        None was found in <code>{html.escape(str(found.folder.absolute()))}</code>.</p>
        <p>The bundled model over the bundled text, in a few minutes:</p>
        <pre>twell demo --no-app --out {folder}/demo</pre>
        <p>A model and a text of your own:</p>
        <pre>twell capture MODEL --text FILE --out {folder}/NAME</pre>
        <p>This page shows it once it begins.</p></div>"""
    )
    _await()


def not_found(found: Shelf, wanted: str) -> None:
    """The page of an address whose run is not there."""
    reason = found.broken.get(wanted)
    said = (
        html.escape(reason)
        if reason
        else (
            f"The address names the run <b>{html.escape(wanted)}</b>, and "
            f"<code>{html.escape(str(found.folder.absolute()))}</code> holds none of that name. It may have been "
            "moved, renamed or deleted. Where it is about to begin, this page shows it then."
        )
    )
    title = "This run cannot be read" if reason else "This run is gone"
    st.html(f'<div class="tw-empty"><h1 class="tw-title">{title}</h1><p>{said}</p><p>Choose another above.</p></div>')
    _await(wanted)


@st.fragment(run_every=LOOK)
def _await(wanted: str | None = None) -> None:
    """Look again and again, and draw the page anew once the run is there; without a name, any."""
    there = shelf().runs
    if wanted in there or (wanted is None and there):
        draw_anew()


def unreadable_folders(found: Shelf) -> None:
    """Which folders look like runs and cannot be read, and why."""
    with st.popover(f"{plural(len(found.broken), 'run')} cannot be read", type="tertiary", key="broken"):
        rows = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in found.broken.items())
        st.html(f'<dl class="tw-facts">{rows}</dl>')


def unreadable(run: Run, error: Exception) -> None:
    """In place of a page whose files went away, or broke, while it was being drawn."""
    said = str(error) if isinstance(error, UserError) else f"A file of {run.name} could not be read ({error})."
    st.warning(widgets.plain(said))
