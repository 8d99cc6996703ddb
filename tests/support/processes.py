"""Run the tests in processes that are forked once all of them are collected: `pytest --processes N`.

Collecting takes a process 5 s, and importing what captures and pages need 6 s more. A fork has both behind it.
PYTEST_DONT_REWRITE: tests/conftest.py imports this before pytest does.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import pytest

ROW = pytest.StashKey[int]()  # of a test: its row of files that run in one process
OWN = "TWELL_TEST_FOLDER"  # in the environment of a forked process: its folder for temporary files
# What tests of several files lead to: imported once before forking, not once in each process.
IMPORTED = (
    "twell.workbench.capturing.command",
    "twell.workbench.training.command",
    "twell.workbench.bench.command",
    "transformers.models.llama.modeling_llama",
    "ibis.backends.sql.compilers.duckdb",  # duckdb itself begins a thread, which a fork would not have
    "plotly.graph_objects",
    "torch._inductor.compile_fx",
)
if any(word.split("=")[0] == "--processes" for word in sys.argv):  # which share the processors: further threads wait
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # for `is_available`: CUDA may not run before a fork
FORKS = multiprocessing.get_context("fork")
Ahead = Literal["wait", "end"]  # answers to a process that asks for a test, where there is none for it


@dataclass
class Forked:
    """A process: the tests that it is to run, by their numbers in the session, and those given to it, not yet ended."""

    process: BaseProcess
    pipe: Connection
    left: deque[int] = field(default_factory=deque)
    given: deque[int] = field(default_factory=deque)
    last: int = 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--processes", type=int, default=0, help="fork so many processes, which share the tests by file")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    if session.config.option.processes:
        import_beforehand()


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Give a file to one process, and the files of a row too; tests that go by the clock run last, alone."""
    count = session.config.option.processes
    if not count or session.config.option.collectonly or session.testsfailed:
        return None
    if begun := other_threads():
        pytest.exit(f"Expected tests that begin no thread as they are collected, got {begun}: forks lack them.", 4)
    groups: dict[Any, list[int]] = {}
    alone: list[int] = []
    for at, item in enumerate(session.items):
        group = groups.setdefault(item.stash.get(ROW, item.path), [])
        (alone if item.get_closest_marker("alone") else group).append(at)
    parent = Parent(session)
    parent.run(filter(None, groups.values()), count)
    parent.run(filter(None, [alone]), 1, alone=True)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


def import_beforehand() -> None:
    """Import what tests lead to, if the whole of them was collected, or some that begin to."""
    if "transformers" in sys.modules:
        with warnings.catch_warnings(action="ignore"):  # of libraries, of each other
            for name in IMPORTED:
                importlib.import_module(name)


class Parent:
    """Forks processes, names them tests, and says what they report."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.forks = session, 0
        self.folder: Path = session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        self.waiting: deque[deque[int]] = deque()
        self.running: list[Forked] = []

    def run(self, groups: Iterable[Iterable[int]], processes: int, alone: bool = False) -> None:
        """Run groups of tests, each in one process, in so many processes."""
        self.waiting.extend(map(deque, groups))
        try:
            for _ in range(min(processes, len(self.waiting))):
                self.fork(alone)
            while self.running:
                wait([forked.pipe for forked in self.running], timeout=5)
                for forked in [forked for forked in self.running if not self.hear(forked)]:
                    self.running.remove(forked)
                    if not self.ended_well(forked) and self.waiting:
                        self.fork(alone)
        finally:  # by Ctrl-C, say: who asks for a test or reports one hears that nobody is there, and ends
            for forked in self.running:
                forked.pipe.close()

    def fork(self, alone: bool) -> None:
        """Fork a process that asks for tests."""
        ours, theirs = FORKS.Pipe()
        self.forks += 1
        closed = [ours, *(forked.pipe for forked in self.running)]
        process = FORKS.Process(
            target=_as_forked, args=(self.session, theirs, closed, self.folder / f"process-{self.forks}", alone)
        )
        process.start()
        theirs.close()
        self.running.append(Forked(process, ours))

    def hear(self, forked: Forked) -> bool:
        """Do what a process asks for or reports, if it does; return whether it goes on."""
        try:
            if not forked.pipe.poll():
                return forked.process.is_alive()
            hook, sent = forked.pipe.recv()
            if hook == "next":
                forked.pipe.send(self.next_of(forked))
                return True
        except (EOFError, OSError):
            return False
        if hook == "pytest_runtest_logfinish":
            forked.last = forked.given.popleft()
        _say(self.session.config, hook, sent)  # what that raises, as where nobody reads what is printed, ends the tests
        return True

    def next_of(self, forked: Forked) -> int | Ahead:
        """Return the next test of a process, or what it is to do if none is known."""
        if self.stops():
            return "end"
        if not forked.left and forked.given:
            return "wait"
        if not forked.left and self.waiting:
            forked.left = self.waiting.popleft()
        if not forked.left:
            return "end"
        forked.given.append(forked.left.popleft())
        return forked.given[-1]

    def stops(self) -> bool:
        """Return whether no further test is to begin."""
        return bool(self.session.shouldfail or self.session.shouldstop)

    def ended_well(self, forked: Forked) -> bool:
        """Return whether a process ended as it was told to; else the test that it ran has failed, others are left."""
        forked.process.join()
        code, given = forked.process.exitcode, forked.given
        if self.stops() or (not code and not given):
            return True
        item = self.session.items[given.popleft() if given else forked.last]
        forked.left.extendleft(reversed(given))
        if forked.left:
            self.waiting.appendleft(forked.left)
        text = f"The process of this test ended with {code}, in the test or as what it shares with others was closed."
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self.session.config.hook.pytest_runtest_logreport(report=report)
        return False


def other_threads() -> list[str]:
    """Return the names of this process's threads but the first, and but pyarrow's for memory, which expects forks."""
    others = [path for path in Path("/proc/self/task").glob("*/comm") if path.parent.name != str(os.getpid())]
    return [name for path in others if (name := path.read_text().strip()) != "jemalloc_bg_thd"]


def _say(config: pytest.Config, hook: str, sent: dict[str, Any]) -> None:
    """Call a hook of pytest in the parent, as a forked process would have."""
    if "report" in sent:
        sent["report"] = config.hook.pytest_report_from_serializable(config=config, data=sent["report"])
    if "warning_message" in sent:
        text, category, file, line = sent["warning_message"]
        sent["warning_message"] = warnings.WarningMessage(text, type(category, (Warning,), {}), file, line)
        return config.hook.pytest_warning_recorded.call_historic(kwargs=sent)
    return getattr(config.hook, hook)(**sent)


class Child:
    """In a forked process: sends the parent what pytest says of the tests, in place of showing it."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config, self.pipe, self.begun = config, pipe, False

    def ask(self) -> int | Ahead:
        self.pipe.send(("next", None))
        return self.pipe.recv()

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.pipe.send(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.pipe.send(("pytest_runtest_logreport", {"report": data}))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.pipe.send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_warning_recorded(self, warning_message: Any, when: str, nodeid: str, location: Any) -> None:
        fields = (str(warning_message.message), warning_message.category.__name__)
        place = (warning_message.filename, warning_message.lineno)
        sent = {"warning_message": (*fields, *place), "when": when, "nodeid": nodeid, "location": location}
        if self.begun:  # as it is registered a plugin hears all earlier ones, too
            self.pipe.send(("pytest_warning_recorded", sent))


class Between:
    """Stands for a next test that is not known yet: what the session shares stays, all else is closed."""

    def __init__(self, session: pytest.Session) -> None:
        self.session = session

    def listchain(self) -> list[Any]:
        return [self.session]


def _as_forked(session: Any, pipe: Connection, closed: list[Connection], own: Path, alone: bool) -> None:
    """Run the tests that the parent names, until it names no more.

    closed: pipes of the parent alone; own: the folder for temporary files
    """
    for end in closed:
        end.close()
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its files are the parent's
    capture.start_global_capturing()
    config.pluginmanager.unregister(name="terminalreporter")
    child = Child(config, pipe)
    config.pluginmanager.register(child)
    child.begun = True
    own.mkdir(mode=0o700)
    config._tmp_path_factory._basetemp = own
    os.environ |= {OWN: str(own), "XDG_STATE_HOME": str(own / "state")}
    if alone:  # nothing else runs: the processors are free
        os.environ.pop("OMP_NUM_THREADS", None)
        if "torch" in sys.modules:
            importlib.import_module("torch").set_num_threads(os.cpu_count() or 1)
    try:
        _run_named(session, child)
        session._setupstate.teardown_exact(None)
    finally:
        capture.stop_global_capturing()  # so that what went wrong is seen


def _run_named(session: pytest.Session, child: Child) -> None:
    """Run each test that the parent names, once the next one is known or known to be of another file."""
    at = child.ask()
    while not isinstance(at, str) and not session.shouldfail:
        following = child.ask()
        after: Any = Between(session) if isinstance(following, str) else session.items[following]
        session.config.hook.pytest_runtest_protocol(item=session.items[at], nextitem=after)
        at = child.ask() if following == "wait" else following
