"""Runs of a page within one session take turns at what they share, and one that is replaced changes none of it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from streamlit.runtime import Runtime, RuntimeConfig
from streamlit.runtime.fragment import MemoryFragmentStorage
from streamlit.runtime.memory_media_file_storage import MemoryMediaFileStorage
from streamlit.runtime.memory_uploaded_file_manager import MemoryUploadedFileManager
from streamlit.runtime.pages_manager import PagesManager
from streamlit.runtime.scriptrunner.script_cache import ScriptCache
from streamlit.runtime.scriptrunner.script_runner import ScriptRunner, ScriptRunnerEvent
from streamlit.runtime.scriptrunner_utils.script_requests import RerunData
from streamlit.runtime.state import SessionState

from twell.app.server.session_lock import take_turns

SCRIPT = """
import stage, streamlit as st
if st.query_params["page"] == "left":
    st.rerun()
st.query_params["chosen"] = "1"
stage.begun.set()
stage.go_on.wait(30)
stage.seen = st.query_params.to_dict()
"""


class Session:
    """What the runs of a session share, for a script of a few lines."""

    def __init__(self, script: Path) -> None:
        self.script, self.state, self.pages = str(script), SessionState(), PagesManager(str(script))
        self.fragments, self.loop = MemoryFragmentStorage(), asyncio.new_event_loop()

    def run(self, page: str) -> ScriptRunner:
        """Return a run of a page that has not begun."""
        data = RerunData(query_string=f"page={page}", page_script_hash=page)
        files = MemoryUploadedFileManager("/upload")
        return ScriptRunner(
            "session", self.script, self.state, files, ScriptCache(), data, {}, self.fragments, self.pages,
            event_loop=self.loop,
        )  # fmt: skip


@pytest.fixture
def new_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], Session]]:
    """Yield a function that makes a session whose runs take turns."""
    for owner, name in (
        (ScriptRunner, "__init__"),
        (PagesManager, "set_script_intent"),
        (PagesManager, "set_current_page_script_hash"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # which puts Streamlit's back
    take_turns()
    monkeypatch.setattr(Runtime, "_instance", None)
    script = tmp_path / "main.py"
    script.write_text(SCRIPT)
    Runtime(RuntimeConfig(str(script), MemoryMediaFileStorage("/media"), MemoryUploadedFileManager("/upload")))
    sessions: list[Session] = []

    def make() -> Session:
        sessions.append(Session(script))
        return sessions[-1]

    yield make
    for session in sessions:
        session.loop.close()


@pytest.mark.parametrize("same", [True, False])
def test_turns(new_session: Callable[[], Session], same: bool) -> None:
    session = new_session()
    left = session.run("left")._session_state
    with left.query_params():  # holds the lock
        chosen = (session if same else new_session()).run("chosen")._session_state
        written = threading.Thread(target=chosen.__setitem__, args=("key", 1))
        written.start()
        written.join(0.5)
        assert written.is_alive() == same
    written.join(30)
    assert not written.is_alive()
    assert chosen["key"] == 1


def test_a_run_that_is_replaced_as_it_begins_anew(
    new_session: Callable[[], Session], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It sets no address and no page under the run that replaces it, and ends without a word."""
    stage = ModuleType("stage")
    monkeypatch.setitem(sys.modules, "stage", stage)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # Python's, as in the server
    stage.begun, stage.go_on = threading.Event(), threading.Event()
    ended, replaced = threading.Event(), threading.Event()

    def on_event(runner: ScriptRunner, event: ScriptRunnerEvent, **_: object) -> None:
        if event is ScriptRunnerEvent.SCRIPT_STOPPED_FOR_RERUN:
            ended.set()
            assert replaced.wait(30)

    session = new_session()
    left = session.run("left")
    left.on_event.connect(on_event)
    left.start()
    assert ended.wait(30)
    left.request_stop()
    chosen = session.run("chosen")
    chosen.start()
    assert stage.begun.wait(30)
    replaced.set()
    left._script_thread.join(30)
    stage.go_on.set()
    chosen._script_thread.join(30)
    assert not left._script_thread.is_alive()
    assert not chosen._script_thread.is_alive()
    assert stage.seen == {"page": "chosen", "chosen": "1"}
    assert session.pages.intended_page_script_hash == session.pages.current_page_script_hash == "chosen"
    assert capsys.readouterr().err == ""
