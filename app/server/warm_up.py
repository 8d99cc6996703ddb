"""Compute the first results of every page before it is opened.

The first look at a table of a long run decodes its summary, which takes from a tenth of a second to several on a busy
machine, and no time from then on. So once a page of a run that has ended is drawn, and its summaries are up to date, a
thread computes the DEFAULT_QUERIES of the other pages, and builds their DEFAULT_FIGURES. Queries that read the rows of
single tokens are left out of them. Cost: 0.9 s of a processor for a run of 10 M tokens and 28 layers, once for each
server and run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from twell.app.ui.pages import PAGES
from twell.app.ui.query import Query, fetch
from twell.app.ui.run_cache import digest, open_cached
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run

PAUSE = 2.0  # seconds, in which a browser draws the page that was opened
GAP = 0.2  # seconds between queries, so that pages opened meanwhile have the processor


def default_queries() -> list[Query]:
    """Return the queries with which the pages begin, page by page."""
    modules = [import_module(f"twell.app.{page.data}") for page in PAGES.values() if page.data]
    return [query for module in modules for query in module.DEFAULT_QUERIES]


def default_figures() -> list[Callable[[Run], Any]]:
    """Return what builds the figures with which pages begin, of the results of `default_queries` alone."""
    modules = [import_module(f"twell.app.{page.data}") for page in PAGES.values() if page.data]
    return [build for module in modules for build in getattr(module, "DEFAULT_FIGURES", ())]


def start(run: Run) -> None:
    """Begin to compute the results of the other pages in the background, unless that has begun already.

    Nothing is computed for a run that is being recorded, whose results would soon be outdated.
    """
    if run.manifest.status != "recording":
        _start_thread(str(run.path), digest(run))


@lru_cache(maxsize=256)
def _start_thread(path: str, run_digest: str) -> threading.Thread:
    thread = threading.Thread(target=_compute, args=(path, run_digest), daemon=True)
    thread.start()
    return thread


def _compute(path: str, run_digest: str) -> None:
    """Fetch each query's result and build each figure, until the run's digest is no longer the given one."""
    time.sleep(PAUSE)
    steps: list[Callable[[Run], Any]] = [partial(fetch, query=query) for query in default_queries()]
    for step in [*steps, *default_figures()]:
        try:
            run = open_cached(Path(path))
            if digest(run) != run_digest:
                return
            step(run)
        except (UserError, OSError):
            pass  # the page that needs the result says what is missing
        time.sleep(GAP)
