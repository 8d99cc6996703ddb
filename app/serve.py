"""Streamlit's command line, started with what the pages need already loaded, so that the first visitor waits for none
of it: `python -m twell.app.serve run app/pages/main.py -- RUNS`. Costs about a second more before the server answers.

Streamlit looks through all that Python holds for garbage after every run of a page and every look at a growing run:
0.1 s a time for the libraries alone, which are none. So they are set aside, once they are loaded.
"""

from __future__ import annotations

import gc
import threading
from importlib import import_module

# What the pages import, but for what needs a running server; and what answers about single tokens, while that starts.
PAGES = (
    "streamlit",
    "twell.analysis.overview",
    "twell.analysis.contexts",
    "twell.app.layer_figures",
    "twell.app.passage",
)
LATER = "twell.analysis.engine"


def load(*names: str) -> None:
    """Import modules, and leave what they made out of later collections."""
    for name in names:
        import_module(name)
    gc.collect()
    gc.freeze()


def main() -> None:
    """Load, then hand over."""
    load(*PAGES)
    threading.Thread(target=load, args=(LATER,), daemon=True).start()
    from streamlit.web.cli import main as streamlit

    streamlit(prog_name="streamlit")


if __name__ == "__main__":
    main()
