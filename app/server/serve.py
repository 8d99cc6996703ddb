"""Run the dashboard's server: `python -m twell.app.server.serve RUNS SETTINGS`, with Streamlit's settings as JSON.

Before it answers, it imports what the pages need, so that the first visitor does not wait for that: about a second. It
announces to the browser the scripts that draw a page's elements (`preload`), has links between pages followed in place
(`links`), answers only requests that name its own address (`guard`), keeps pages in one folder (`base`), and has the
runs of a session take turns at what they share (`session_lock`).

Streamlit collects garbage after every run of a page and every look at a growing run. With the libraries among the
objects that are searched, that takes 0.1 s each time, so they are exempted once they are loaded.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from twell.workbench.garbage import uncollected

MAIN = Path(__file__).parents[1] / "main.py"
# PAGES is imported before the server starts: what the pages need, except what needs a running server. LATER is imported
# while it starts: what queries about single tokens need.
PAGES = (
    "streamlit",
    "twell.analysis.overview",
    "twell.analysis.tokens.contexts",
    "plotly.subplots",
    "twell.analysis.figures.style",
    "twell.analysis.passage",
)
LATER = ("twell.analysis.engines.duckdb", "ibis.backends.duckdb")


def load(*names: str) -> None:
    """Import modules, and exempt their objects from garbage collections."""
    with uncollected():
        for name in names:
            import_module(name)


def main(runs: str, settings: str, *flags: str) -> None:
    """Serve the dashboard until the process is stopped.

    Args:
        runs: the folder of runs.
        settings: Streamlit's settings, as JSON.
        flags: for the pages (`run_cache`).
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # uvicorn hands it on: temporary folders are removed, jobs end
    load(*PAGES)
    threading.Thread(target=load, args=LATER, daemon=True).start()
    import streamlit as st
    from starlette.middleware import Middleware

    from twell.app.server.base import InOneFolder
    from twell.app.server.guard import Guard, content_policy
    from twell.app.server.links import Linked
    from twell.app.server.preload import Announced, scripts
    from twell.app.server.session_lock import take_turns

    take_turns()
    sys.argv = [str(MAIN), runs, *flags]  # where the pages look for the folder of runs
    config = json.loads(settings)
    guard = Middleware(Guard, host=config["server.address"], policy=content_policy())
    announced = Middleware(Announced, scripts=scripts())
    app = st.App(MAIN, middleware=[guard, Middleware(InOneFolder), announced, Middleware(Linked)])
    try:
        with suppress(KeyboardInterrupt):  # Ctrl-C, once the server has ended
            app.run(config=config)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher's, while this process ends already


if __name__ == "__main__":
    main(*sys.argv[1:])
