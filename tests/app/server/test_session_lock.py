"""Two runs of a page within one session take turns at its state, those of two sessions do not."""

from __future__ import annotations

import threading

import pytest
from streamlit.runtime.state import SafeSessionState, SessionState

from twell.app.server.session_lock import share_lock


@pytest.mark.parametrize("same", [True, False])
def test_turns(monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    monkeypatch.setattr(SafeSessionState, "__init__", SafeSessionState.__init__)  # which puts Streamlit's back
    share_lock()
    state = SessionState()
    ended = SafeSessionState(state, lambda: None)
    begun = SafeSessionState(state if same else SessionState(), lambda: None)
    written = threading.Thread(target=begun.__setitem__, args=("key", 1))
    with ended.query_params():  # holds the lock
        written.start()
        written.join(0.5)
        assert written.is_alive() == same
    written.join(10)
    assert not written.is_alive()
    assert begun["key"] == 1
