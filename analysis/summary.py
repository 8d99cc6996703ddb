"""Summaries: what every table of the API is read from, built once a run and kept beside its parts.

    twell summarize runs/demo                              build them now, with a progress bar
    twell summarize runs/demo --summary-only runs/small    and copy the run without its rows of single tokens
    twell summarize runs/large --engine spark://HOST:PORT  on a cluster: see `spark`
    from twell.analysis import ensure; ensure(run)         the same from Python; every table calls it by itself

`summary/vN/` holds one Parquet file a table (declared in `workbench.schema.SUMMARIES`) and `built.json`, the checksums
of the parts that they cover. New parts are added to what is there; any other difference builds them anew, and so does
each doubling of a run past a million tokens (`class_step`). Files are written under temporary names; `built.json` is
taken away first and comes back last, so what a crash leaves behind is never taken for a summary; builders in several
processes wait for each other. Cost: see `sums`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from twell.workbench.errors import Missing, UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.schema import SUMMARIES
from twell.workbench.store import Run, copy_without_activity, open_run

BUILT = "built.json"
SOURCES = ("activity", "neurons", "tiles", "unions")  # the tables of a run that summaries are made from
CLASS_TOKENS = 2**19  # rank correlations come from one to two times as many, of a run that has them
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
    if options.summary_only is not None:
        copy_without_activity(runs[0].path, options.summary_only)
        runs = [open_run(options.summary_only)]
        console.print(f"{runs[0].path}: a copy without rows of single tokens", **PLAIN)
    return runs


def ensure(run: Run, tick: Tick | None = None, engine: str = "duckdb") -> None:
    """Build what summaries the run lacks; at once where they are up to date.

    `tick` is called with the number of tokens read since the last call; `engine` is where queries run: duckdb, or
    spark://HOST:PORT. Missing where a run has nothing to summarise, UserError where a part cannot be read.
    """
    if _current(run):
        return
    if run.manifest.summary_only:
        raise Missing(
            f"{run.name} is a summary-only run whose summaries are missing or of another version than "
            f"{SUMMARIES.version}: summarise the run it was copied from and copy it again."
        )
    run.parts("activity")
    with _alone(run):
        if not _current(run):
            _build(run, tick or (lambda tokens: None), engine)


def read(run: Run, name: str, **filters: Any) -> pd.DataFrame:
    """A summary as a DataFrame, brought up to date first; `filters` keep rows by the values of columns.

    Columns that a summary-only copy of an earlier revision lacks are empty.
    """
    ensure(run)
    path = run.summary_path(name)
    if not path.exists():
        raise Missing(f"{run.name} holds no {name}: {_lacking(run, name)}.")
    wanted = [(column, "=", value) for column, value in filters.items()]
    found = pq.read_table(path, filters=wanted or None).to_pandas()
    return found.reindex(columns=[column.name for column in SUMMARIES.tables[name].columns])


def _lacking(run: Run, name: str) -> str:
    if _listed(run).get("revision", 0) < SUMMARIES.revision:
        return EARLIER
    return LACKING.get(name, "it was not recorded")


LACKING = {
    "neurons": "it was captured with --probes counts, which keeps counts per token alone",
    "tiles": "it was captured without tile counts",
    "unions": "it was captured without the different neurons of blocks of tokens",
    "surprisal": "no loss was recorded (--no-loss)",
    "surprisal_ranks": "no loss was recorded (--no-loss)",
    "surprisal_classes": "no loss was recorded (--no-loss)",
    "used": "its model has no ReLU on the up branch, so every neuron that fires is used",
}
EARLIER = "its summaries are of an earlier revision: summarise the run it was copied from and copy it again"


def class_step(run: Run) -> int:
    """Of how many groups of 20 sequences the tables of rank correlations take one: a power of two that grows with the
    run."""
    return 2 ** max(0, (run.manifest.tokens // CLASS_TOKENS).bit_length() - 1)


def _folder(run: Run) -> Path:
    return run.summary_path("any").parent


def _wanted(run: Run) -> dict[str, str]:
    return {part.file: part.sha256 for part in run.manifest.parts if part.table in SOURCES}


def _listed(run: Run) -> dict[str, Any]:
    """What is told of the summaries there; empty where there are none."""
    try:
        told = json.loads((_folder(run) / BUILT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) and isinstance(told.get("parts"), dict) else {}


def _built(run: Run) -> dict[str, str]:
    """Which parts the summaries there cover; none where they would have to be built anew."""
    told = _listed(run)
    fits = told.get("revision") == SUMMARIES.revision and told["class_step"] >= class_step(run)
    return told.get("parts", {}) if fits or run.manifest.summary_only else {}


def _current(run: Run) -> bool:
    """Whether the summaries cover the run's parts; those of a run still growing may cover more than this reader saw."""
    built, wanted = _built(run), _wanted(run)
    if not built or run.manifest.summary_only:
        return bool(built)
    return wanted == built or (run.manifest.status == "recording" and wanted.items() <= built.items())


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


def _build(run: Run, tick: Tick, engine: str) -> None:
    from twell.analysis import build  # a query engine is loaded where there is something to build, and not before

    built, wanted = _built(run), _wanted(run)
    grows = bool(built) and built.items() <= wanted.items()
    new = {file for file in wanted if not grows or file not in built}
    damaged = run.damaged(*SOURCES)
    if damaged:
        raise UserError(
            f"Expected {run.name} as it was written, got: {damaged[0]} Copy it again from where it was recorded, or "
            "capture anew."
        )
    tables = build.build(run, new, _read_all(run) if grows else {}, tick, engine)
    _publish(run, tables, wanted)


def _read_all(run: Run) -> dict[str, pa.Table]:
    found = {name: run.summary_path(name) for name in SUMMARIES.tables if name != "token_scores"}
    return {name: pq.read_table(path) for name, path in found.items() if path.exists()}


def _publish(run: Run, tables: dict[str, pa.Table], parts: dict[str, str]) -> None:
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
            pq.write_table(table, temporary, **_encoding(table))
            os.replace(temporary, run.summary_path(name))
        about = {"version": SUMMARIES.version, "revision": SUMMARIES.revision, "class_step": class_step(run)}
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
    with Progress(*bars, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(f"summarising {run.name}", total=run.manifest.tokens)
        yield lambda tokens: progress.update(task, advance=tokens)
