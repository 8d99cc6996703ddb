"""Compare files of a run with their checksums, once for as long as they stay as they are.

The idea: a file that was read and found whole need not be read again before its size, times or inode change. That is
held in memory and, where reading took long, in `summary/verified.json` for later processes. Writing to a file sets its
time of change (ctime), which no program can set back as it can the time of modification; so a restored time deceives
nobody. The clock ticks every few milliseconds: a file that changed just before it was read is not held. Pages carry
checksums of their own, which are compared at every reading, so that a disk that forgets is noticed too.

Cost: 5 µs a file that is known; else 0.6 to 2 s of a core a gigabyte, side by side.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from twell.workbench.run.checks import regular_file
from twell.workbench.run.part_files import checksum

FILE = Path("summary") / "verified.json"
RULES = "1"  # of the checks of columns; a new one makes every file be checked again
THREADS, WORTH_THREADS = 4, 2**20  # that read files, at most; bytes from which on starting them pays
HELD = 2**16  # files known in memory
WORTH_WRITING = 2**20  # bytes read at once, from which on the result is written down
TICK, COARSE_TICK = 50_000_000, 3_000_000_000  # ns: of this machine's clock, and of any file system's

State = tuple[int, int, int, int]  # inode, size in bytes, time of modification, time of change
_memory: dict[tuple[str, str], tuple[State, str, str, str]] = {}  # by folder and file: state, sha256, key, fault


def faults(
    folder: Path, files: Mapping[str, str], check: Callable[[str], str] = lambda file: "", key: str = ""
) -> dict[str, str]:
    """Return a clause for each file that is missing, differs from its checksum or fails a check; none for whole ones.

    files: the sha256 of each file, by its path in `folder`; check: returns what is wrong with a file whose checksum is
    right, "" if nothing is; key: names all that `check` goes by, but the file
    """
    clauses: dict[str, str] = {}
    states: dict[str, State] = {}  # of files whose result is not held
    for file in files:
        state = _state(folder / file)
        if isinstance(state, str):
            clauses[file] = state
            continue
        known = _memory.get((str(folder), file))
        if known is not None and known[:3] == (state, files[file], key):
            clauses[file] = known[3]
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
    """Return a clause for each file, "" for a whole one; hold the results, and write them down if they took long."""
    stored = _load(folder)
    written = stored.get(key, {})
    pending = [file for file in files if written.get(file) != [*states[file], files[file]]]
    clauses = dict.fromkeys(files, "")

    def clause(file: str) -> str:
        return _compared(folder / file, files[file]) or check(file)

    if len(pending) < 2 or sum(states[file][1] for file in pending) < WORTH_THREADS:
        clauses |= {file: clause(file) for file in pending}
    else:
        with ThreadPoolExecutor(min(THREADS, len(pending))) as pool:
            clauses |= dict(zip(pending, pool.map(clause, pending), strict=True))
    now, lasting = time.time_ns(), dict[str, list[object]]()
    for file in files:
        state = states[file]
        if _state(folder / file) != state:
            continue  # it changed while it was read
        if now - state[3] > TICK:
            if len(_memory) >= HELD:
                _memory.clear()
            _memory[str(folder), file] = (state, files[file], key, clauses[file])
        if now - state[3] > COARSE_TICK and not clauses[file]:
            lasting[file] = [*state, files[file]]
    if sum(states[file][1] for file in pending if file in lasting) >= WORTH_WRITING:
        _save(folder, {**stored, key: written | lasting})
    return clauses


def _state(path: Path) -> State | str:
    """Return the state of a file, or what is wrong with it, as a clause."""
    try:
        state = regular_file.require_regular(path)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns


def _compared(path: Path, sha256: str) -> str:
    try:
        return "" if checksum(path) == sha256 else "differs from its checksum in the manifest"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"


def _load(folder: Path) -> dict[str, dict[str, list[object]]]:
    """Return what earlier processes found whole: by key, the inode, size, times and sha256 of each file."""
    try:
        stored = json.loads(regular_file.read_text(folder / FILE))
    except (OSError, ValueError, RecursionError):
        return {}
    current = stored.get(RULES) if isinstance(stored, dict) else None
    if not isinstance(current, dict) or not all(isinstance(files, dict) for files in current.values()):
        return {}
    return current


def _save(folder: Path, entries: dict[str, dict[str, list[object]]]) -> None:
    """Write down the files that are whole, beside the summaries; where that fails, each process reads for itself."""
    path = folder / FILE
    if not path.parent.is_dir() or path.parent.is_symlink():
        return
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with suppress(OSError):
        regular_file.remove_leftover(temporary)
        temporary.write_text(json.dumps({RULES: entries}), encoding="utf-8")
        os.replace(temporary, path)
