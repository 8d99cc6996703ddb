"""The process with the model, started before anybody asks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.browser_pages import Watched

from twell.app.jobs.worker import WorkerProcess
from twell.workbench.errors import UserError


def test_a_process_that_is_ended_while_it_starts_leaves_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks yet, or who did has stopped the reading."""
    unheard: list[Any] = []

    def ends(worker: WorkerProcess) -> None:
        raise UserError("Expected a process with torch, it did not start.")

    monkeypatch.setattr(WorkerProcess, "_start", ends)
    monkeypatch.setattr(threading, "excepthook", unheard.append)
    worker = WorkerProcess()
    worker.prepare()
    for thread in threading.enumerate():
        if thread.name == "twell-worker":
            thread.join()
    assert unheard == []
    assert not worker.busy
    worker.close()


def test_measuring_is_possible_once_the_process_has_started(bundled_run: Path, growing_page: Watched) -> None:
    """Without a click: the button waits for a process with torch, and then is on."""
    page = growing_page.page
    growing_page.open("/text?run=tiny", ".tw-passage")
    page.get_by_role("button", name="Your own text").click()
    growing_page.open("/kernels?run=tiny", ".js-plotly-plot")
    page.get_by_role("button", name="Measure now").click()
    page.wait_for_selector(".st-key-measure-start button:enabled", timeout=120_000)
    page.get_by_text("Wait until it is done").wait_for(state="detached")  # a moment later
    growing_page.check()
