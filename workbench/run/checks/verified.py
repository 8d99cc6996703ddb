"""Compare files of a run with their checksums, once for as long as they stay as they are.

The idea: a file that was read and found whole need not be read again before its size, times or inode change. That is
held in memory, and for later processes in `summary/verified.json`, which lies in the cache for a run that stays as it
is. Writing to a file sets its time of change (ctime), which no program can set back as it can the time of modification;
so a restored time deceives nobody. The clock ticks every few milliseconds: a file that changed just before it was read
is not held. Pages carry checksums of their own, which are compared at every reading from a day after that on (`whole`).

Cost: 5 µs a file that is known; else 0.6 to 2 s of a core a gigabyte, side by side.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from twell.workbench.errors import UserError
from twell.workbench.run.checks import regular_file, whole
from twell.workbench.run.checks.whole import State
from twell.workbench.run.homes.summary_home import notes_home
from twell.workbench.run.part_files import checksum

FILE = Path("summary") / "verified.json"
RULES = "2"  # of the checks of columns; a new one makes every file be checked again
THREADS, WORTH_THREADS = 4, 2**20  # that read files, at most; bytes from which on starting them pays
ENTRY = 6  # a state, a sha256 and a time
HELD = 2**16  # results in memory
TICK, COARSE_TICK = 50_000_000, 3_000_000_000  # ns: of this machine's clock, and of any file system's

Entries = dict[str, dict[str, list[Any]]]  # by key and file: its state, its sha256 and when it was compared
_memory: dict[tuple[str, str, str], tuple[State, str, str]] = {}  # by folder, file and key: state, sha256, fault


def faults(
    folder: Path, files: Mapping[str, str], check: Callable[[str], str] = lambda file: "", key: str = ""
) -> dict[str, str]:
    """Return a clause for each file that is missing, differs from its checksum or fails a check; none for whole ones.

    files: the sha256 of each file, by its path in `folder`; check: returns what is wrong with a file whose checksum is
    right, "" if nothing is; key: names all that `check` goes by, but the file
    """
    clauses: dict[str, str] = {}
    states: dict[str, State] = {}  # of files whose result is not held
    where = str(folder)
    for file in files:
        state = _state(f"{where}/{file}")
        if isinstance(state, str):
            clauses[file] = state
            continue
        known = _memory.get((where, file, key))
        if known is not None and known[:2] == (state, files[file]):
            clauses[file] = known[2]
        else:
            states[file] = state
    if states:
        clauses |= _read(folder, {file: files[file] for file in states}, states, check, key)
    return {file: clauses[file] for file in files if clauses[file]}


def _read(
    folder: Path,
    files: Mapping[str, str],
    states: Mapping[str, State],
    check: Callable[[str], str],
    key: str,
) -> dict[str, str]:
    """Return a clause for each file, "" for a whole one; hold the results, and write them down for other processes."""
    stored = _load(folder)
    written = stored.get(key, {})
    pending = [file for file in files if written.get(file, [])[:-1] != [*states[file], files[file]]]
    unread = set(pending)
    times = {file: _compared_at(stored, file, [*states[file], files[file]]) for file in pending}
    clauses = dict.fromkeys(files, "")

    def clause(file: str) -> str:
        return ("" if times[file] else _compared(folder / file, files[file])) or check(file)

    if len(pending) < 2 or sum(states[file][1] for file in pending) < WORTH_THREADS:
        clauses |= {file: clause(file) for file in pending}
    else:
        with ThreadPoolExecutor(min(THREADS, len(pending))) as pool:
            clauses |= dict(zip(pending, pool.map(clause, pending), strict=True))
    now, lasting, where = time.time_ns(), dict[str, list[Any]](), str(folder)
    for file in files:
        state = states[file]
        if file in unread and _state(f"{where}/{file}") != state:
            continue  # it changed while it was read
        seconds = (times[file] or now // 10**9) if file in unread else written[file][-1]
        if now - state[3] > TICK:
            _hold(where, file, key, (state, files[file], clauses[file]), seconds)
        if file in unread and now - state[3] > COARSE_TICK and not clauses[file]:
            lasting[file] = [*state, files[file], seconds]
    if lasting:
        _save(folder, {**stored, key: written | lasting})
    return clauses


def _compared_at(stored: Entries, file: str, state: list[object]) -> int:
    """Return when a file was compared with its checksum in this state, in seconds since 1970; 0 if not known."""
    entries = (files[file] for files in stored.values() if file in files)
    return max((entry[-1] for entry in entries if entry[:-1] == state), default=0)


def _hold(folder: str, file: str, key: str, result: tuple[State, str, str], seconds: int) -> None:
    """Keep a result in memory; a file that is whole was compared at `seconds`."""
    if len(_memory) >= HELD:
        _memory.clear()
    _memory[folder, file, key] = result
    if not result[2]:
        whole.remember(f"{folder}/{file}", result[0], seconds)


def _state(path: str) -> State | str:
    """Return the state of a file, or what is wrong with it, as a clause."""
    try:
        state = regular_file.require_regular(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return whole.state_of(state)


def _compared(path: Path, sha256: str) -> str:
    try:
        return "" if checksum(path) == sha256 else "differs from its checksum in the manifest"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def _load(folder: Path) -> Entries:
    """Return what earlier processes found whole; not to be changed."""
    try:
        path = notes_home(folder) / FILE
        return _stored(str(path), whole.state_of(os.stat(path)))
    except (OSError, UserError):  # nothing yet, or no home
        return {}


@lru_cache(maxsize=64)
def _stored(path: str, state: State) -> Entries:
    """Return what a file of results holds. state: changes with it, and with it the entry in the cache."""
    try:
        stored = json.loads(regular_file.read_text(Path(path)))
    except (OSError, ValueError, RecursionError):
        return {}
    current = stored.get(RULES) if isinstance(stored, dict) else None
    if not isinstance(current, dict) or not all(isinstance(files, dict) for files in current.values()):
        return {}
    return {key: {file: entry for file, entry in files.items() if _is_entry(entry)} for key, files in current.items()}


def _is_entry(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == ENTRY and type(entry[-1]) is int


def _save(folder: Path, entries: Entries) -> None:
    """Write down the files that are whole, beside the summaries; where that fails, each process reads for itself."""
    with suppress(OSError, UserError):
        path = notes_home(folder) / FILE
        if path.parent.parent != folder:
            path.parent.mkdir(parents=True, exist_ok=True)
        elif not path.parent.is_dir() or path.parent.is_symlink():
            return
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        regular_file.remove_leftover(temporary)
        temporary.write_text(json.dumps({RULES: entries}), encoding="utf-8")
        os.replace(temporary, path)
