"""What the tests of a capture share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.clock import Clock

from twell.workbench.capturing.timing import calibration, call_times, timings


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (timings, calibration, call_times):
        tells = SimpleNamespace(perf_counter=lambda: made.now, monotonic=lambda: made.now)
        monkeypatch.setattr(module, "time", tells)
    return made
