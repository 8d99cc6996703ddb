"""The pages without a run: none is there, none has the name in the address, or one cannot be read; and no such page."""

from __future__ import annotations

import html
import shlex

import streamlit as st

from twell.app.ui import widgets
from twell.app.ui.formatting import marked_up, message_markdown, plural
from twell.app.ui.run_catalog import RECORDED, RunCatalog, find_runs
from twell.app.ui.url_state import redraw_page
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run

INTERVAL = 1.0  # seconds between two looks for a run that is not there yet


def no_runs(catalog: RunCatalog) -> None:
    """Draw the page of a folder without runs: how to record one."""
    folder = html.escape(shlex.quote(str(catalog.folder)))
    st.html(
        f"""<div class="tw-empty"><h1 class="tw-title">No runs yet</h1>
        <p>A run is what <code>twell capture</code> records: which neurons each token of a text fires, layer by layer.
        There is none in <code>{html.escape(str(catalog.folder.absolute()))}</code>.</p>
        <p>Capture the bundled model on the bundled text, in a few minutes:</p>
        <pre>twell demo --no-app --out {folder}/demo</pre>
        <p>Or capture a model and a text of your own:</p>
        <pre>twell capture MODEL --text FILE --out {folder}/NAME</pre>
        <p>This page shows the run as soon as it begins.</p></div>"""
    )
    _wait_for_run()


def note_bundled(catalog: RunCatalog) -> None:
    """Draw a note that the run which is shown came with the package, where the folder has no run of its own."""
    if catalog.runs and all(run.startswith(RECORDED) for run in catalog.runs):
        folder = html.escape(str(catalog.folder.absolute()))
        command = html.escape(shlex.join(["twell", "demo", "--no-app", "--out", str(catalog.folder / "demo")]))
        widgets.note(
            f'<span class="tw-mark">bundled</span> There is no run in <code>{folder}</code> yet: this one came with '
            f"the package. To record one here: <code>{command}</code>"
        )


def no_page(name: str) -> None:
    """Draw the page of an address that names a page which is not there."""
    st.html(
        f"""<div class="tw-empty"><h1 class="tw-title">There is no such page</h1>
        <p>The dashboard has no page <b>{html.escape(name)}</b>. Choose one above.</p></div>"""
    )


def not_found(catalog: RunCatalog, name: str) -> None:
    """Draw the page of an address whose run is not there or cannot be read."""
    reason = catalog.broken.get(name)
    text = (
        marked_up(reason)
        if reason
        else (
            f"There is no run <b>{html.escape(name)}</b> in "
            f"<code>{html.escape(str(catalog.folder.absolute()))}</code>. It may have been moved, renamed or deleted. "
            "If its capture has not started yet, this page shows it as soon as it does."
        )
    )
    was_shown = isinstance(shown := st.session_state.get("current_run"), Run) and shown.path.name == name
    title = "This run cannot be read" if reason else "This run is gone" if was_shown else "There is no such run"
    st.html(
        f'<div class="tw-empty"><h1 class="tw-title">{title}</h1><p>{text}</p><p>Choose another run above.</p></div>'
    )
    _wait_for_run(name)


@st.fragment(run_every=INTERVAL)
def _wait_for_run(name: str | None = None) -> None:
    """Look for a run again and again, and draw the page once it is there; any run if no name is given."""
    runs = find_runs().runs
    if name in runs or (name is None and runs):
        redraw_page()


def lacks_activity(run: Run, page: str) -> bool:
    """Return whether a page is about activity, by its address, and the run is a training that recorded none."""
    return run.manifest.only_trains and page not in ("training", "compare", "export")


def only_trained(run: Run) -> None:
    """Draw the page of a training where a capture's would stand: where to look, and how to capture the model."""
    model, name = (html.escape(shlex.quote(word)) for word in (str(run.path), run.name))
    st.html(
        """<div class="tw-empty"><h1 class="tw-title">This run is a training</h1>
        <p>It recorded how the model gets sparse, step by step, and no activity of single tokens.</p></div>"""
    )
    widgets.page_link("training", "See how it gets sparse")
    if run.manifest.status == "complete" and not (run.path / "config.json").exists():
        return  # its log alone is here
    st.html(
        f"""<div class="tw-empty"><p>To see which tokens fire which neurons, capture the trained model:</p>
        <pre>twell capture {model} --text FILE --out runs/{name}-activity</pre></div>"""
    )


def unreadable_folders(catalog: RunCatalog) -> None:
    """Draw the button that lists the folders which look like runs and cannot be read, with the reasons."""
    with st.popover(f"{plural(len(catalog.broken), 'run')} cannot be read", type="tertiary", key="broken"):
        st.html(widgets.facts_html(catalog.broken))


def unreadable(run: Run, error: Exception) -> None:
    """Draw a warning in place of a page whose files broke or went away while it was being drawn."""
    text = str(error) if isinstance(error, UserError) else f"A file of {run.name} could not be read ({error})."
    st.warning(message_markdown(text))
