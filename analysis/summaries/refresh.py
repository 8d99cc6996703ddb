"""Bring summaries up to date: build them once, and again when parts are added or change.

    twell summarize runs/demo                              build them now, with a progress bar
    twell summarize runs/demo --summary-only runs/small    and copy the run without its rows of single tokens
    twell summarize runs/large --engine spark://HOST:PORT  on a cluster: see `spark`
    from twell.analysis import ensure; ensure(run)         the same from Python; `open_summaries` does it for a question

The sums of new parts are added to those on disk. Any other difference builds the summaries anew, and so does each
doubling of a run past a million tokens (`rank_tables.class_step`). Tables that need the means of the whole run are
computed from every part; while a run is being recorded, that happens only when one of them is read. Files are written
under temporary names, and the list of the parts that they cover comes last (`built`). Builders in several processes
wait for each other. Cost: see `build`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from twell.analysis.summaries.built import (
    DOCUMENTS,
    PartHashes,
    Tick,
    covered_parts,
    damage,
    damaged_summaries,
    folder,
    growing,
    home,
    includes,
    is_current,
    parts_of,
    read_built,
    remove_built,
    write_built,
)
from twell.analysis.summaries.documents import Documents, read_documents
from twell.workbench.errors import Missing, UserError
from twell.workbench.options import SummarizeOptions
from twell.workbench.run import locks
from twell.workbench.run.checks.regular_file import is_within, remove_leftover
from twell.workbench.run.part_files import ADVICE, read_part
from twell.workbench.run.schema import SUMMARIES
from twell.workbench.run.store import Run, open_run
from twell.workbench.run.summary_only import copy_without_activity

ROW_GROUP = 2**20  # rows: a column of one group is read without a copy
PLAIN: dict[str, Any] = {"highlight": False, "soft_wrap": True}  # paths as they are


def summarize(options: SummarizeOptions) -> list[Run]:
    """Build the summaries of runs and, with `summary_only`, copy one run without its rows of single tokens.

    Return the runs; with `summary_only`, the copy. UserError for several runs with `summary_only`, and for a
    damaged one.
    """
    if options.summary_only is not None and len(options.runs) != 1:
        raise UserError(f"Expected one run with --summary-only, got {len(options.runs)}: copy them one by one.")
    runs = [open_run(path, options.without_damaged) for path in options.runs]
    console = Console(markup=False)
    for run in runs:
        with _progress(console, run) as tick:
            ensure(run, tick, options.engine)
        size = sum(file.stat().st_size for file in folder(run).iterdir())
        console.print(f"{run.path}: summaries of {run.manifest.tokens:,} tokens, {size / 1e6:.1f} MB", **PLAIN)
        if run.left_out:
            console.print(f"{run.path}: {run.left_out}", **PLAIN)
        for table, sentence in damage(run).items():
            console.print(f"{table} left out: {sentence}", **PLAIN)
    if options.summary_only is not None:
        if damage(runs[0]):
            raise UserError(f"Expected a whole run to copy, got: {next(iter(damage(runs[0]).values()))}")
        copy_without_activity(runs[0].path, options.summary_only, options.without_damaged)
        runs = [open_run(options.summary_only)]
        console.print(f"{runs[0].path}: a copy without rows of single tokens", **PLAIN)
    return runs


def ensure(run: Run, tick: Tick | None = None, engine: str = "duckdb", scored: bool = True) -> None:
    """Build the summaries that the run lacks; return at once where they are up to date.

    tick: is called with the number of tokens read since the last call; engine: where queries run, duckdb or
    spark://HOST:PORT; scored: whether summaries that need the means of the whole run are built too; without them, a new
    part costs one reading of that part alone.
    Summaries of a table with a damaged part are left out until that part is repaired (`damage`). Raises Missing where
    the run has nothing to summarise, UserError where it cannot be written to and for any other engine.
    """
    if engine != "duckdb" and not engine.startswith("spark://"):
        raise UserError(f"Expected duckdb or spark://HOST:PORT as the engine, got {engine!r}.")
    if not is_within(folder(run), home(run)):
        raise UserError(
            f"Expected summaries in the run's own folder {folder(run)}, got a link to elsewhere: remove the link."
        )
    if run.manifest.summary_only and (damaged := damaged_summaries(run, read_built(run))):
        raise UserError(
            f"Expected the summaries of {run.path} as they were written, {damaged[0]}: summarise the run that they "
            "come from and copy it again."
        )
    if is_current(run, scored):
        return
    if run.manifest.summary_only:
        raise Missing(
            f"{run.name} is a summary-only run whose summaries are missing or of another version than "
            f"{SUMMARIES.version}: summarise the run it was copied from and copy it again."
        )
    run.files("activity")  # Missing where there is none
    with _locked(run):
        if not is_current(run, scored):
            latest = run
            if growing(run):  # another process may have summarised more by now
                latest = open_run(run.path, without_damaged=bool(run.left_out))
            _build(latest, tick or (lambda tokens: None), engine, scored)


@contextmanager
def _locked(run: Run) -> Iterator[None]:
    """Let one process build at a time, where the system has file locks."""
    with ExitStack() as stack:
        try:
            stack.enter_context(locks.locked(folder(run)))
        except OSError as error:
            raise _not_writable(run, error) from None
        yield


def _not_writable(run: Run, error: OSError) -> UserError:
    return UserError(
        f"Expected to write summaries in {folder(run)}, got {error.strerror or error}: free some space, or copy the "
        "run to a folder that can be written to."
    )


@dataclass(frozen=True)
class _Plan:
    """The work to be done on a run's summaries.

    new: parts to read; extend: whether their sums are added to those on disk; cover: the parts that the summaries then
    cover; damaged: tables to leave out, each with a sentence; documents: those of the run
    """

    new: Collection[str]
    extend: bool
    cover: PartHashes
    damaged: dict[str, str]
    documents: Documents


def _plan(run: Run) -> _Plan:
    """Return what to build. Only parts that are to be read are checked for damage.

    A table with a damaged part is left out as a whole, so where the summaries on disk cover it they cannot be extended.
    """
    built = read_built(run)
    parts, covered, documents = parts_of(run), covered_parts(run, built), read_documents(run)
    # Blocks of a source that by now has many documents are to be whole documents, and so are those that were unknown.
    same_clusters = not (set(built.cut) - set(documents.cut)) and built.known == documents.known
    if covered and includes(parts, covered) and same_clusters:
        new = parts.keys() - covered.keys()
        damaged = _damaged_tables(run, new)
        cover = parts_of(run, without=damaged)
        if includes(cover, covered):
            return _Plan(cover.keys() - covered.keys(), True, cover, damaged, documents)
    damaged = _damaged_tables(run, parts)
    cover = parts_of(run, without=damaged)
    return _Plan(cover.keys(), False, cover, damaged, documents)


def _build(run: Run, tick: Tick, engine: str, scored: bool) -> None:
    from twell.analysis.summaries.build import build  # which loads a query engine: only where there is work for one

    plan = _plan(run)
    scores = scored and "activity" not in plan.damaged
    sums = _sums_on_disk(run) if plan.extend else {}
    tables = build(run, plan.new, sums, tick, engine, scores, plan.documents)
    _publish(run, tables, plan, scored)


def _damaged_tables(run: Run, files: Collection[str]) -> dict[str, str]:
    """Return which tables have a damaged part among these files, with a sentence each."""
    damaged = {table: run.damaged(table, files=files) for table in (*SUMMARIES.sources, DOCUMENTS)}
    advice = f"{ADVICE[0].upper()}{ADVICE[1:]}."
    return {table: f"{sentences[0]} {advice}" for table, sentences in damaged.items() if sentences}


def _sums_on_disk(run: Run) -> dict[str, pa.Table]:
    """Return the summaries on disk that add up."""
    paths = {name: run.summary_path(name) for name, table in SUMMARIES.tables.items() if table.adds_up}
    return {name: read_part(path) for name, path in paths.items() if path.exists()}


def _publish(run: Run, tables: dict[str, pa.Table], plan: _Plan, scored: bool) -> None:
    """Replace the files of the summaries, and last the list of what they cover."""
    try:
        remove_built(run)
        for name, declaration in SUMMARIES.tables.items():
            table = tables.get(name)
            # Neurons of which none fired are known, as those of a run that did not count them are not.
            if table is None or (not table.num_rows and declaration.absent and name != "neurons"):
                run.summary_path(name).unlink(missing_ok=True)
                continue
            temporary = folder(run) / f"{name}.tmp"
            remove_leftover(temporary)
            pq.write_table(table, temporary, row_group_size=ROW_GROUP, write_page_checksum=True, **_encoding(table))
            os.replace(temporary, run.summary_path(name))
        write_built(run, plan.cover, scored, plan.damaged, plan.documents)
    except OSError as error:
        raise _not_writable(run, error) from None


def _encoding(table: pa.Table) -> dict[str, Any]:
    """Return options of the Parquet writer. Integers, which are mostly sorted, are stored as differences: half the size
    of a dictionary, and faster to write and to read."""
    integers = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    return {
        "compression": "zstd",
        "use_dictionary": False,
        "column_encoding": dict.fromkeys(integers, "DELTA_BINARY_PACKED"),
    }


@contextmanager
def _progress(console: Console, run: Run) -> Iterator[Tick]:
    """Show a bar of tokens read, on a terminal."""
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"))
    hidden = not console.is_terminal  # where it would leave an empty line behind
    with Progress(*bars, TimeRemainingColumn(), console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(f"summarising {run.name}", total=run.manifest.tokens)
        yield lambda tokens: progress.update(task, advance=tokens)
