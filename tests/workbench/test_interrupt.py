"""A first signal asks for a good end, a second one ends at once; afterwards signals are what they were."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from twell.workbench.interrupt import Interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_at_once(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(number)
    with Interrupt("this batch") as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), number)
        assert interrupt.requested
        assert "Stopping after this batch; press again to stop at once." in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_another_thread_leaves_signals_alone() -> None:
    before, inside = signal.getsignal(signal.SIGINT), []

    def enter() -> None:
        with Interrupt("this batch"):
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert inside == [before]
