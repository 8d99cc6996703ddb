"""Check runs whole: `twell check RUN`.

Every question compares the files that it reads with their checksums and declared columns. This reads all of them,
every row, and the summaries beside; it prints a table and a sentence for each fault. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from twell.analysis.checks.rows import ReadSums, part_fault, run_faults
from twell.workbench.errors import UserError, lacking
from twell.workbench.options import CheckOptions
from twell.workbench.run.store import Run, list_runs, open_run

WHOLE = "whole"


def check(options: CheckOptions) -> list[str]:
    """Check runs, print what they hold and each fault; return the faults. Raises UserError if there are any.

    A run that cannot be opened is an error of its own if it is the only fault.
    """
    faults: list[str] = []
    unopened: list[UserError] = []
    for path in options.runs:
        try:
            run = open_run(path)
        except UserError as error:
            unopened.append(_folder_of_runs(path) or error)
            continue
        faults += _check_run(run)
    if len(unopened) == 1 and not faults:
        raise unopened[0]
    for refusal in unopened:
        print(refusal)
    if unopened or faults:
        total = len(unopened) + len(faults)
        number = "a fault" if total == 1 else f"{total} faults"
        others = ", or use the other parts: app, tokens, compare and export take --without-damaged" if faults else ""
        raise UserError(
            f"Expected whole runs, got {number}: copy what is damaged again from where it was recorded{others}."
        )
    return faults


def _folder_of_runs(path: Path) -> UserError | None:
    """Return the error that says how the runs in a folder are checked; None where it holds none."""
    if not list_runs(path)[0]:
        return None
    return UserError(f"Expected a run in {path}, found a folder of runs: give {path}/* to check each of them.")


def _check_run(run: Run) -> list[str]:
    """Check one run and print what was found."""
    parts, console = run.manifest.parts, Console(markup=False)
    faults: dict[str, list[str]] = {}  # by table
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*bars, console=console, transient=True, disable=not console.is_terminal) as progress:
        files = progress.add_task(f"checking {run.name}: files", total=len(parts))
        sums = ReadSums.zero(run.layers)
        for part in parts:
            clause = part_fault(run, part, sums)
            faults.setdefault(part.table, []).extend([f"{part.file} {clause}."] if clause else [])
            progress.advance(files)
        tokens = progress.add_task("tokens, for the summaries", total=run.manifest.tokens)
        between = list(_between(run, sums, faults, lambda read: progress.advance(tokens, read)))
    print(f"{run.path}: {run.manifest.status}, {run.manifest.tokens:,} tokens")
    for table in dict.fromkeys(part.table for part in parts):
        own = [part for part in parts if part.table == table]
        size, rows = sum(part.bytes for part in own) / 1e6, sum(part.rows for part in own)
        state = f"{len(faults[table])} damaged" if faults[table] else WHOLE
        files_of = f"{len(own):>5} file{'s' if len(own) != 1 else ' '}"
        print(f"  {table:<12} {files_of} {rows:>14,} rows {size:>10,.1f} MB  {state}")
    problems = [sentence for sentences in faults.values() for sentence in sentences] + between
    state = f"{len(between)} faults" if between else WHOLE
    if any(faults.values()):
        state = "not checked: a part is damaged"
    elif _has_unread_summaries(run):
        state += ", summaries not checked: pip install 'twell-workbench[dashboard]'"
    print(f"  {'together, and summaries':<50} {state}")
    for sentence in problems:
        print(sentence)
    return problems


def _between(run: Run, sums: ReadSums, faults: dict[str, list[str]], tick: Callable[[int], None]) -> Iterator[str]:
    """Yield a sentence for each fault between tables, and of the summaries; none where a part is damaged."""
    if any(faults.values()):
        return
    yield from run_faults(run, sums)
    if not lacking("dashboard"):
        from twell.analysis.checks.summaries import summary_faults

        yield from summary_faults(run, tick)


def _has_unread_summaries(run: Run) -> bool:
    """Return whether a run has summaries that cannot be read here: where models run, analysis may not be installed."""
    return bool(lacking("dashboard")) and (run.path / "summary").is_dir()
