"""Processes that share a folder: a wait for one that holds its lock is said, and one that has ended is not alive."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest

from twell.workbench.run import locks
from twell.workbench.run.rank_share import RankShare, is_alive


def test_a_long_wait_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(locks, "PATIENCE", 0.05)
    holder, entered = RankShare(), list[bool]()
    holder.claim(tmp_path)

    def wait() -> None:
        with locks.locked(tmp_path):
            entered.append(True)

    waiting = Thread(target=wait)
    waiting.start()
    time.sleep(0.5)
    assert not entered
    holder.release()
    waiting.join(10)
    assert entered and capsys.readouterr().err == f"Waiting for another process that writes to {tmp_path} …\n"
    wait()
    time.sleep(0.2)
    assert not capsys.readouterr().err, "nothing is said of a folder that is free"


def test_a_process_that_has_ended_is_not_alive() -> None:
    """Nor before its parent has asked how it ended, as a launcher may never do."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(process.pid)
    process.kill()
    deadline = time.monotonic() + 10
    while is_alive(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.wait()
    assert not is_alive(process.pid)
