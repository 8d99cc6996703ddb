"""What other pages ask first of a run, answered before they are opened.

The first look at a table of a long run decodes its summary: a tenth of a second to several on a busy machine, and none
from then on. Once a page of a run that has ended is drawn, and its summaries so are there, a thread asks what the
others begin with. Questions that read the rows of single tokens are left to those who ask them. Costs 0.6 s of a
processor for a run of 10 M tokens and 28 layers, once a server and run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from twell.app.activity.layer_data import spread, surprise
from twell.app.activity.position_data import panels
from twell.app.neurons.neuron_data import density_bins, neuron_list
from twell.app.ui.url_state import ask, digest, opened
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run

PAUSE = 2.0  # seconds, in which a browser draws the page that was asked for
GAP = 0.2  # seconds between questions, which are for whoever clicks meanwhile
# As the pages ask with nothing chosen, and Layers with its other loss: so answers are found under the same arguments.
QUESTIONS: tuple[tuple[str | Callable[..., Any], dict[str, Any]], ...] = (
    ("by_token", {"min_count": 20, "rank": "z"}),
    ("by_token", {"min_count": 1}),
    ("by_word", {"min_count": 20}),
    ("token_classes", {}),
    (density_bins, {}),
    (neuron_list, {"layer": None, "kind": "hot"}),
    (spread, {}),
    *((surprise, {"of": of}) for of in ("next", "own")),
    *(("surprisal_correlation", of) for of in ({}, {"of": "next"}, {"of": "own"})),
    (panels, {}),
    ("position_fit", {}),
    ("findings", {}),
)


def read_ahead(run: Run) -> None:
    """Begin to answer for the other pages, in the background; nothing where that has begun, and for a run that still
    grows, whose answers would not last."""
    if run.manifest.status != "recording":
        _begin(str(run.path), digest(run))


@lru_cache(maxsize=256)
def _begin(path: str, seen: str) -> threading.Thread:
    thread = threading.Thread(target=_read, args=(path, seen), daemon=True)
    thread.start()
    return thread


def _read(path: str, seen: str) -> None:
    time.sleep(PAUSE)
    for question, arguments in QUESTIONS:
        try:
            run = opened(Path(path))
            if digest(run) != seen:
                return
            ask(run, question, **arguments)
        except (UserError, OSError):
            pass  # the page that asks says what is missing
        time.sleep(GAP)
