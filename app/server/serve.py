"""The dashboard's server: `python -m twell.app.server.serve RUNS SETTINGS`, the settings of Streamlit as JSON.

It starts with what the pages need already loaded, so that the first visitor waits for none of it, and tells the browser
with each page what its elements are drawn with (`preload`). It answers only requests that name its own address
(`guard`). Costs about a second more before the server answers.

Streamlit looks through all that Python holds for garbage after every run of a page and every look at a growing run:
0.1 s a time for the libraries alone, which are none. So they are set aside, once they are loaded.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
from importlib import import_module
from pathlib import Path

MAIN = Path(__file__).parents[1] / "main.py"
# What the pages import, but for what needs a running server; and what answers about single tokens, while that starts.
PAGES = (
    "streamlit",
    "twell.analysis.overview",
    "twell.analysis.tokens.contexts",
    "twell.app.activity.layer_figures",
    "twell.analysis.passage",
)
LATER = ("twell.analysis.engines.duckdb", "ibis.backends.duckdb")


def load(*names: str) -> None:
    """Import modules, and leave what they made out of later collections."""
    for name in names:
        import_module(name)
    gc.collect()
    gc.freeze()


def main(runs: str, settings: str) -> None:
    """Load, then serve until stopped."""
    load(*PAGES)
    threading.Thread(target=load, args=LATER, daemon=True).start()
    import streamlit as st
    from starlette.middleware import Middleware

    from twell.app.server.guard import Guard, content_policy
    from twell.app.server.preload import Announced, scripts

    sys.argv = [str(MAIN), runs]  # as the pages find them, whatever starts the server
    config = json.loads(settings)
    guard = Middleware(Guard, host=config["server.address"], policy=content_policy())
    st.App(MAIN, middleware=[guard, Middleware(Announced, scripts=scripts())]).run(config=config)


if __name__ == "__main__":
    main(*sys.argv[1:])
