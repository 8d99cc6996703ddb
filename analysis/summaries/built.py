"""Record what the summaries on disk were built from: `built.json`, in the same folder.

It lists the parts that the summaries cover with their checksums, their revision, and the tables that they leave out
because a part is damaged. It is removed first and written last, so that what a crash leaves behind is never mistaken
for a summary. Cost: 1 ms to read.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from twell.analysis.summaries.documents import Documents
from twell.analysis.summaries.rank_tables import class_step
from twell.workbench.run.checks import verified
from twell.workbench.run.checks.manifest_fields import digest
from twell.workbench.run.checks.regular_file import read_text, remove_leftover
from twell.workbench.run.checks.whole import State, state_of
from twell.workbench.run.homes.summary_home import BUILT
from twell.workbench.run.part_files import TICK, checksum
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run

DOCUMENTS = "sequences"  # the table that tells the documents

PartHashes = dict[str, str]  # the sha256 of each part's file
Tick = Callable[[int], None]  # is called with the number of tokens read since the last call


@dataclass(frozen=True)
class Built:
    """Record of the parts that summaries were built from.

    parts: the parts that they cover; revision: that of the summaries' schema; class_step: what `rank_tables.class_step`
    returned for the run; scored: whether tables that need the means of the whole run are among them; damaged: the
    tables left out, each with a sentence (`says`) and the sizes and times of its files when they were found damaged
    (`seen`); files: the sha256 of each summary's file by its name, empty in lists from before these were recorded;
    clusters: the number of documents, or blocks of long ones, that standard errors are taken over, 0 in lists from
    before revision 4, where these were sequences; cut: the sources whose long documents are cut into blocks; known:
    whether the run said what its documents are.
    """

    parts: PartHashes = field(default_factory=dict)
    revision: int = 0
    class_step: int = 0
    scored: bool = False
    damaged: dict[str, dict[str, Any]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    clusters: int = 0
    cut: list[str] = field(default_factory=list)
    known: bool = False


def folder(run: Run) -> Path:
    """Return the folder of the run's summaries."""
    return run.summary_path("any").parent


def home(run: Run) -> Path:
    """Return the folder that the folder `summary` lies in."""
    return folder(run).parents[1]


def read_built(run: Run) -> Built:
    """Return what the run's summaries were built from; a `Built` without parts if there are none. Not to be changed."""
    path = folder(run) / BUILT
    try:
        stat = os.stat(path)
    except OSError:
        return Built()
    recent = time.time_ns() - stat.st_ctime_ns <= TICK  # it may change again, and keep its state
    return (_read.__wrapped__ if recent else _read)(path, state_of(stat))


@lru_cache(maxsize=256)
def _read(path: Path, state: State) -> Built:
    """Return what a list holds. state: changes with the file, and with it the entry in the cache."""
    try:
        stored = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError):
        return Built()
    if not isinstance(stored, dict) or stored.get("sha256", digest(stored)) != digest(stored):
        return Built()
    fields = {name: stored[name] for name in Built.__dataclass_fields__ if name in stored}
    return Built(**fields) if fields.get("parts") and _has_types(fields) else Built()


def _has_types(fields: Mapping[str, Any]) -> bool:
    """Return whether the fields of a list are of the types of `Built`."""
    defaults = asdict(Built())
    if any(type(value) is not type(defaults[name]) for name, value in fields.items()):
        return False
    checksums = [*fields["parts"].values(), *fields.get("files", {}).values()]
    damaged = list(fields.get("damaged", {}).values())
    if not all(isinstance(entry, dict) and {"says", "seen"} <= entry.keys() for entry in damaged):
        return False
    return all(isinstance(text, str) for text in [*checksums, *(entry["says"] for entry in damaged)])


def write_built(run: Run, parts: PartHashes, scored: bool, damaged: Mapping[str, str], documents: Documents) -> None:
    """Write the list, once the summaries are in place; damaged: a sentence for each table left out."""
    details = {table: {"says": sentence, "seen": _file_states(run, table)} for table, sentence in damaged.items()}
    files = {name: checksum(run.summary_path(name)) for name in SUMMARIES.tables if run.summary_path(name).exists()}
    about = documents.count(run.manifest.sequences), list(documents.cut), documents.known
    built = asdict(Built(parts, SUMMARIES.revision, class_step(run), scored, details, files, *about))
    stored = {"version": SUMMARIES.version, **{name: built[name] for name in built if name != "parts"}}
    stored |= {"sha256": digest({**stored, "parts": parts}), "parts": parts}
    temporary = folder(run) / f"{BUILT}.tmp"
    remove_leftover(temporary)
    temporary.write_text(json.dumps(stored, indent=1), encoding="utf-8")
    os.replace(temporary, folder(run) / BUILT)


def remove_built(run: Run) -> None:
    """Remove the list, before the summaries are replaced."""
    (folder(run) / BUILT).unlink(missing_ok=True)


def damage(run: Run) -> dict[str, str]:
    """Return the tables that summaries leave out because a part is missing or differs from its checksum, each with a
    sentence. A table is no longer among them once any of its files has changed."""
    damaged = read_built(run).damaged
    return {table: entry["says"] for table, entry in damaged.items() if entry["seen"] == _file_states(run, table)}


def with_damage_note(frame: pd.DataFrame, run: Run, *tables: str) -> pd.DataFrame:
    """Add to a frame's note that these tables are left out of it because a part is damaged; return the frame."""
    sentences = [sentence.rstrip(".") for table, sentence in damage(run).items() if table in tables]
    if sentences:
        frame.attrs["note"] = "; ".join(filter(None, [str(frame.attrs.get("note", "")).rstrip("."), *sentences]))
    return frame


def damaged_summaries(run: Run, built: Built) -> list[str]:
    """Return a clause for each summary that is missing or differs from its checksum. A file is hashed again only once
    it has changed."""
    where = folder(run).relative_to(home(run)).as_posix()
    files = run.manifest.summaries or {f"{where}/{name}.parquet": sha256 for name, sha256 in built.files.items()}
    if run.manifest.summary_only:
        left_out = {f"{where}/{name}.parquet" for name, table in SUMMARIES.tables.items() if not table.in_summary_only}
        files = {file: sha256 for file, sha256 in files.items() if file not in left_out}
    clauses = verified.faults(home(run), files, key="summaries")
    return [f"{Path(file).name} {clause}" for file, clause in clauses.items()]


def summary_fault(run: Run, name: str, check: Callable[[], str], rule: str) -> str:
    """Return what is wrong with a summary, as a clause; "" if nothing is.

    check: looks for it, once for as long as the file stays as it is; rule: names all that `check` goes by, but the file
    """
    file = run.summary_path(name).relative_to(home(run)).as_posix()
    sha256 = (run.manifest.summaries or {}).get(file) or read_built(run).files.get(name)
    if sha256 is None:  # in copies of before summaries had checksums
        return check()
    return verified.faults(home(run), {file: sha256}, lambda _: check(), rule).get(file, "")


def _file_states(run: Run, table: str) -> list[list[int] | None]:
    """Return size and times of modification and change of a table's files, None for one that is missing."""
    states: list[list[int] | None] = []
    for path in run.files(table):
        stat = path.stat() if path.exists() else None
        states.append(None if stat is None else [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    return states


def growing(run: Run) -> bool:
    """Return whether the run is still being recorded."""
    return run.manifest.status == "recording"


def parts_of(run: Run, without: Collection[str] = ()) -> PartHashes:
    """Return the parts that summaries are built from; without: tables whose parts are left out."""
    tables = {*SUMMARIES.sources, DOCUMENTS} - set(without)
    return {part.file: part.sha256 for part in run.manifest.parts if part.table in tables}


def covered_parts(run: Run, built: Built) -> PartHashes:
    """Return the parts that need not be read again; none where the summaries have to be built anew, because they are of
    an earlier revision, one of their files has changed, or the run has doubled since (`class_step`)."""
    reusable = built.revision == SUMMARIES.revision and built.class_step >= class_step(run)
    return built.parts if reusable and not damaged_summaries(run, built) else {}


def includes(parts: PartHashes, others: PartHashes) -> bool:
    """Return whether all the others are among the parts, unchanged."""
    return all(parts.get(file) == sha256 for file, sha256 in others.items())


def is_current(run: Run, scored: bool) -> bool:
    """Return whether the summaries cover the run's parts.

    scored: whether summaries that need the means of the whole run are required too. The summaries of a run that is
    still being recorded may cover more parts than this reader of it knows. A summary-only run cannot build others, so
    its summaries are current if there are any.
    """
    built = read_built(run)
    if run.manifest.summary_only:
        return bool(built.parts)
    covered = covered_parts(run, built)
    if not covered or (scored and not built.scored):
        return False
    needed = parts_of(run, without=damage(run))
    return includes(covered, needed) if growing(run) else covered == needed
