"""Refresh: summaries built for the first time, and again as parts come or change.

    twell summarize runs/demo                              build them now, with a progress bar
    twell summarize runs/demo --summary-only runs/small    and copy the run without its rows of single tokens
    twell summarize runs/large --engine spark://HOST:PORT  on a cluster: see `spark`
    from twell.analysis import ensure; ensure(run)         the same from Python; every table calls it by itself

New parts are added to what is there; any other difference builds them anew, and so does each doubling of a run past a
million tokens (`class_step`). Tables of the whole run's means are taken over every part (`SCORED`): of a run that is
still being recorded, once one of them is asked for. Files are written under temporary names; `built.json`, the
checksums of the parts that they cover, is taken away first and comes back last, so what a crash leaves behind is never
taken for a summary; builders in several processes wait for each other. Cost: see `build`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from twell.analysis.summaries.rank_tables import class_step
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run, copy_without_activity, open_run

BUILT = "built.json"
SOURCES = ("activity", "neurons", "tiles", "unions")  # the tables of a run that summaries are made from
SCORED = ("token_scores", "words")  # the summaries that take the means of the whole run, and so every part anew
ROW_GROUP = 2**20  # rows: a column of one group is read without a copy
PLAIN: dict[str, Any] = {"highlight": False, "soft_wrap": True, "markup": False}  # paths as they are

Tick = Callable[[int], None]


def summarize(options: SummarizeOptions) -> list[Run]:
    """Build the summaries of runs and, with `summary_only`, copy one run without its rows of single tokens."""
    if options.summary_only is not None and len(options.runs) != 1:
        raise UserError(f"Expected one run with --summary-only, got {len(options.runs)}: copy them one by one.")
    runs = [open_run(path) for path in options.runs]
    console = Console()
    for run in runs:
        with _progress(console, run) as tick:
            ensure(run, tick, options.engine)
        size = sum(file.stat().st_size for file in _folder(run).iterdir())
        console.print(f"{run.path}: summaries of {run.manifest.tokens:,} tokens, {size / 1e6:.1f} MB", **PLAIN)
        for table, sentence in damage(run).items():
            console.print(f"{table} left out: {sentence}", **PLAIN)
    if options.summary_only is not None:
        if damage(runs[0]):
            raise UserError(f"Expected a whole run to copy, got: {next(iter(damage(runs[0]).values()))}")
        copy_without_activity(runs[0].path, options.summary_only)
        runs = [open_run(options.summary_only)]
        console.print(f"{runs[0].path}: a copy without rows of single tokens", **PLAIN)
    return runs


def ensure(run: Run, tick: Tick | None = None, engine: str = "duckdb", scored: bool = True) -> None:
    """Build what summaries the run lacks; at once where they are up to date.

    `tick` is called with the number of tokens read since the last call; `engine` is where queries run: duckdb, or
    spark://HOST:PORT; without `scored`, those of SCORED are not asked for, and a new part costs only itself.
    What comes from a table with a damaged part is left out until that part is put right (`damage`). Missing where a run
    has nothing to summarise, UserError where it cannot be written, and for an engine that is neither.
    """
    if engine != "duckdb" and not engine.startswith("spark://"):
        raise UserError(f"Expected duckdb or spark://HOST:PORT as the engine, got {engine!r}.")
    if _current(run, scored):
        return
    if run.manifest.summary_only:
        raise Missing(
            f"{run.name} is a summary-only run whose summaries are missing or of another version than "
            f"{SUMMARIES.version}: summarise the run it was copied from and copy it again."
        )
    run.parts("activity")
    with _alone(run):
        if not _current(run, scored):
            now = open_run(run.path) if growing(run) else run  # others may have summarised more of it than this saw
            _build(now, tick or (lambda tokens: None), engine, scored)


def growing(run: Run) -> bool:
    """Whether the run is still being recorded."""
    return run.manifest.status == "recording"


# Summaries that a run may do without, and what it then is that it lacks.
LACKING = {
    "neurons": "it was captured with --probes counts, which keeps counts per token alone",
    "tiles": "it was captured without tile counts",
    "unions": "it was captured without the different neurons of blocks of tokens",
    "surprisal": "no loss was recorded (--no-loss)",
    "surprisal_ranks": "no loss was recorded (--no-loss)",
    "surprisal_classes": "no loss was recorded (--no-loss)",
    "surprisal_correlations": "no loss was recorded (--no-loss)",
    "used": "its model has no ReLU on the up branch, so every neuron that fires is used",
    "words": "it has no vocab table, which spells the tokens",
}


def _folder(run: Run) -> Path:
    return run.summary_path("any").parent


def damage(run: Run) -> dict[str, str]:
    """The tables that summaries leave out, because a part is missing or differs from its checksum, and a sentence of
    each. A table counts no longer once any of its files has changed."""
    return _damage(run, listed(run))


def _damage(run: Run, told: dict[str, Any]) -> dict[str, str]:
    found = told.get("damaged", {})
    return {table: was["says"] for table, was in found.items() if was["seen"] == _seen(run, table)}


def _seen(run: Run, table: str) -> list[list[int] | None]:
    """Size and time of change of a table's files, None for one that is not there."""
    found = []
    for path in run.parts(table):
        there = path.stat() if path.exists() else None
        found.append(there and [there.st_size, there.st_mtime_ns])
    return found


def _wanted(run: Run, without: Collection[str]) -> dict[str, str]:
    """The parts that summaries are to cover, without those of some tables."""
    return {p.file: p.sha256 for p in run.manifest.parts if p.table in SOURCES and p.table not in without}


def listed(run: Run) -> dict[str, Any]:
    """What is told of the summaries there; empty where there are none."""
    try:
        told = json.loads((_folder(run) / BUILT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) and isinstance(told.get("parts"), dict) else {}


def _built(run: Run, told: dict[str, Any]) -> dict[str, str]:
    """Which parts the summaries there cover; none where they would have to be built anew."""
    fits = told.get("revision") == SUMMARIES.revision and told["class_step"] >= class_step(run)
    return told.get("parts", {}) if fits or run.manifest.summary_only else {}


def _current(run: Run, scored: bool) -> bool:
    """Whether the summaries cover the run's parts; those of a run still growing may cover more than this reader saw."""
    told = listed(run)
    built, wanted = _built(run, told), _wanted(run, _damage(run, told))
    if not built or run.manifest.summary_only:
        return bool(built)
    if scored and not told["scored"]:
        return False
    return wanted == built or (growing(run) and wanted.items() <= built.items())


@contextmanager
def _alone(run: Run) -> Iterator[None]:
    """Let one process build at a time, where the system has file locks."""
    try:
        _folder(run).mkdir(parents=True, exist_ok=True)
        lock = open(run.path / "summary" / ".lock", "w")  # noqa: SIM115 - held open for as long as the lock
    except OSError as error:
        raise _refused(run, error) from None
    with lock:
        try:
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        except ImportError:
            pass
        yield


def _refused(run: Run, error: OSError) -> UserError:
    return UserError(
        f"Expected to write summaries in {_folder(run)}, got {error.strerror or error}: free some space, or copy the "
        "run to a folder that can be written to."
    )


def _build(run: Run, tick: Tick, engine: str, scored: bool) -> None:
    from twell.analysis.summaries import (
        build,  # a query engine is loaded where there is something to build, and not before
    )

    built, every = _built(run, listed(run)), _wanted(run, ())
    harmed = _harmed(run, every.keys() - built.keys() if built.items() <= every.items() else every)
    wanted = _wanted(run, harmed)
    grows = bool(built) and built.items() <= wanted.items()
    if not grows:
        harmed = _harmed(run, every)
        wanted = _wanted(run, harmed)
    new = {file for file in wanted if not grows or file not in built}
    scores = scored and "activity" not in harmed
    tables = build.build(run, new, _read_all(run) if grows else {}, tick, engine, scores)
    _publish(run, tables, wanted, scored, harmed)


def _harmed(run: Run, files: Collection[str]) -> dict[str, str]:
    """Which tables have a damaged part among these files, and a sentence of each."""
    found = {table: run.damaged(table, files=files) for table in SOURCES}
    again = "Copy it again from where it was recorded, or capture anew."
    return {table: f"{sentences[0]} {again}" for table, sentences in found.items() if sentences}


def _read_all(run: Run) -> dict[str, pa.Table]:
    found = {name: run.summary_path(name) for name, table in SUMMARIES.tables.items() if table.adds_up}
    return {name: pq.read_table(path) for name, path in found.items() if path.exists()}


def _publish(
    run: Run, tables: dict[str, pa.Table], parts: dict[str, str], scored: bool, harmed: dict[str, str]
) -> None:
    """Replace the files, `built.json` last."""
    folder = _folder(run)
    try:
        (folder / BUILT).unlink(missing_ok=True)
        for name in SUMMARIES.tables:
            table = tables.get(name)
            if table is None or (not table.num_rows and name in LACKING):
                run.summary_path(name).unlink(missing_ok=True)
                continue
            temporary = folder / f"{name}.tmp"
            pq.write_table(table, temporary, row_group_size=ROW_GROUP, **_encoding(table))
            os.replace(temporary, run.summary_path(name))
        about: dict[str, Any] = {
            "version": SUMMARIES.version,
            "revision": SUMMARIES.revision,
            "class_step": class_step(run),
        }
        damaged = {table: {"says": says, "seen": _seen(run, table)} for table, says in harmed.items()}
        about |= {"scored": scored, "damaged": damaged}
        temporary = folder / f"{BUILT}.tmp"
        temporary.write_text(json.dumps({**about, "parts": parts}, indent=1), encoding="utf-8")
        os.replace(temporary, folder / BUILT)
    except OSError as error:
        raise _refused(run, error) from None


def _encoding(table: pa.Table) -> dict[str, Any]:
    """Sorted integers as differences: half the size of a dictionary, and faster both ways."""
    integers = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    return {
        "compression": "zstd",
        "use_dictionary": False,
        "column_encoding": dict.fromkeys(integers, "DELTA_BINARY_PACKED"),
    }


@contextmanager
def _progress(console: Console, run: Run) -> Iterator[Tick]:
    """A bar of tokens read."""
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    hidden = not console.is_terminal  # where it would leave an empty line behind
    with Progress(*bars, TimeRemainingColumn(), console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(f"summarising {run.name}", total=run.manifest.tokens)
        yield lambda tokens: progress.update(task, advance=tokens)
