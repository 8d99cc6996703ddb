"""Streamlit's command line, started with what the pages need already loaded, so that the first visitor waits for none
of it: `python -m twell.app.serve run app/pages/main.py -- RUNS`. Costs about a second more before the server answers.
"""

from __future__ import annotations

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


def main() -> None:
    """Load, then hand over."""
    for name in PAGES:
        import_module(name)
    threading.Thread(target=import_module, args=(LATER,), daemon=True).start()
    from streamlit.web.cli import main as streamlit

    streamlit(prog_name="streamlit")


if __name__ == "__main__":
    main()
