"""Processes that are killed, or that may write no more, while they summarise or export: nothing half-written is read.

A case copies a run and starts a child that works on the copy. The child is killed after a random time, or between two
of its file operations, or the size of its files is limited, or its disk fills (a small one in memory, where one can be
mounted). Then the run has to answer as it did before, what was exported is whole or not there, and the same work
succeeds once there is room.
"""

from __future__ import annotations

import importlib
import io
import os
import pickle
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from support.fuzz import FAILED, REFUSED, SAME, Outcome, generator, run_questions, sentence_fault
from support.fuzz.small_disk import filled, mounted

from twell.workbench.errors import UserError

ASKED = ("by_layer", "by_token", "by_neuron", "position_fit", "tile_audit", "frame activity")
EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "shutil.copyfile", "os.truncate"}
HOW = ("killed between files", "killed in time", "files limited", "disk full")
ENDED, REFUSAL = 0, 2  # exit codes of a child


@dataclass(frozen=True)
class Limits:
    """After what a child is disturbed, at most: file operations, seconds, bytes of a file, and bytes on its disk."""

    events: int
    seconds: float
    size: int
    room: int


LIMITS = Limits(events=160, seconds=1.5, size=40_000, room=300_000)


def summarise(run: Path, out: Path) -> None:
    """Build the summaries, and copy the run without its rows."""
    import twell.analysis as analysis
    from twell.workbench.options import SummarizeOptions

    analysis.summarize(SummarizeOptions(runs=(run,), summary_only=out / "copy"))


def export(run: Path, out: Path) -> None:
    """Export tables as Parquet and CSV."""
    import twell.analysis as analysis
    from twell.workbench.options import ExportOptions

    for table, ending in (("activity", "parquet"), ("by_layer", "csv"), ("fired", "json")):
        analysis.export(ExportOptions(run=run, table=(table,), out=out / f"{table}.{ending}"))


WORK: dict[str, Callable[[Path, Path], None]] = {"summarise": summarise, "export": export}


def in_child(work: Callable[[], object]) -> int:
    """Run a function in a child that is forked; return the child's process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with redirect_stdout(io.StringIO()):
            work()
        code = ENDED
    except UserError as error:
        fault = sentence_fault(str(error))
        print(f"{fault}{error}" if fault else "", file=sys.stderr, end="")
        code = REFUSAL if not fault else 1
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a child; return its exit code, or the negative number of the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_between_files(number: int) -> None:
    """Kill this process at its file operation of this number, counted from here."""
    left = [number]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def answers(run: Path, out: Path) -> None:
    """Write down what a run answers."""
    from twell.workbench.run.store import open_run

    opened = open_run(run)
    out.write_bytes(pickle.dumps({name: run_questions.ALL[name](opened) for name in ASKED}))


def prepare(folder: Path) -> None:
    """Record the run that all cases copy, and write down what it answers and exports."""
    from support import synthetic_runs
    from support.fuzz.damage import SHAPE

    synthetic_runs.make(folder / "whole" / "run", SHAPE)
    shutil.copytree(folder / "whole" / "run", folder / "first" / "run")
    answers(folder / "first" / "run", folder / "answers")
    export(folder / "first" / "run", folder / "exported")


def cases(folder: Path, seed: int) -> Callable[[int], list[Outcome]]:
    """Prepare in a child, since one that has run threads cannot be forked from, and return the function of a case."""
    for name in ("duckdb", "ibis.backends.duckdb", "scipy.sparse", "scipy.stats", "pyarrow.dataset"):
        importlib.import_module(name)  # once, not in every child
    if ended(in_child(lambda: prepare(folder))) != ENDED:
        raise RuntimeError("the run could not be recorded")
    expected = pickle.loads((folder / "answers").read_bytes())
    small = folder / "disk"
    disk = small if mounted(small) else None
    exported = {path.name: path.read_bytes() for path in (folder / "exported").iterdir()}

    def case(number: int) -> list[Outcome]:
        rng, place = generator(seed, number), small / "case"
        shutil.copytree(folder / "whole", place)
        try:
            name = ("summarise", "export")[number % 2]
            how = HOW[number // 2 % len(HOW)]
            where = f"{name}, {how}"
            work = partial(WORK[name], place / "run", place / "out")
            code = disturbed(work, how, rng, LIMITS, disk)
            outcomes = [Outcome(FAILED, where, f"exit {code}")] if code not in (ENDED, REFUSAL, -9) else []
            return outcomes + _after(where, name, place, expected, exported)
        finally:
            shutil.rmtree(place)

    return case


def disturbed(work: Callable[[], None], how: str, rng: Any, limits: Limits, disk: Path | None) -> int:
    """Work in a child that is disturbed; return its exit code.

    disk: the small disk that it writes to; None where there is none, and the size of its files is limited instead
    """
    events, seconds = int(rng.integers(1, limits.events)), rng.uniform(0, limits.seconds)
    size, room = int(rng.integers(1, limits.size)), int(rng.integers(1, limits.room))

    def begin() -> None:
        if how == "killed between files":
            kill_between_files(events)
        elif how == "files limited" or (how == "disk full" and disk is None):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        work()

    with filled(disk, room) if how == "disk full" and disk is not None else nullcontext():
        child = in_child(begin)
        if how == "killed in time":
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        return ended(child)


def _after(where: str, name: str, place: Path, expected: dict[str, Any], exported: dict[str, bytes]) -> list[Outcome]:
    """Return whether the run answers as before, what is there of the output is whole, and the same work succeeds."""
    outcomes = []
    for path in (place / "out").glob("*"):
        if path.suffix != ".tmp" and path.is_file() and path.read_bytes() != exported[path.name]:
            outcomes.append(Outcome(FAILED, where, f"{path.name} is half-written"))
    copy = place / "out" / "copy"
    if copy.exists() and (copy / "run.json").exists():
        code = ended(in_child(lambda: answers_of_copy(copy)))
        outcomes += [Outcome(FAILED, where, f"a copy that was cut short: exit {code}")] if code != ENDED else []
    code = ended(in_child(lambda: answers(place / "run", place / "answers")))
    if code != ENDED:
        return [*outcomes, Outcome(FAILED, where, f"the run does not answer: exit {code}")]
    after = pickle.loads((place / "answers").read_bytes())
    for question in ASKED:
        if difference := run_questions.difference(expected[question], after[question]):
            outcomes.append(Outcome(FAILED, f"{where}, {question}", difference))
    code = ended(in_child(lambda: WORK[name](place / "run", place / "again")))
    outcomes += [Outcome(FAILED, where, f"the same work again: exit {code}")] if code != ENDED else []
    return outcomes or [Outcome(SAME if copy.exists() or name == "export" else REFUSED, where)]


def answers_of_copy(copy: Path) -> None:
    """Ask a copy without rows."""
    from twell.workbench.run.store import open_run

    run_questions.ALL["by_layer"](open_run(copy))
