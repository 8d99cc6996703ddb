"""The process with the model, started before anybody asks."""

from __future__ import annotations

import threading
from typing import Any

import pytest

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
