"""The runs that the dashboard can show: those of the folder it was started on, and those that came with the package.

A page looks a run up by its name in this catalog and never joins it to a path, so an address cannot leave the folder.
Cost: one manifest read for each run, a millisecond or less.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from twell.app.ui.run_cache import cached_run
from twell.workbench.run.store import Run, list_runs

RECORDED = "recorded/"  # what the names of the package's runs begin with


@dataclass(frozen=True)
class RunCatalog:
    """The runs found, by the name that the address carries.

    Attributes:
        folder: the folder that was searched.
        runs: readable runs by name, newest first, those of the package last.
        broken: a sentence for each folder that looks like a run and cannot be read.
    """

    folder: Path
    runs: dict[str, Run]
    broken: dict[str, str]


def runs_folder() -> Path:
    """Return the folder that the dashboard was started on: its only argument, or `runs`."""
    return Path(sys.argv[1] if len(sys.argv) > 1 else "runs")


def recorded_folder() -> Path | None:
    """Return the folder of the runs that came with the package, or None if there is none."""
    try:
        folder = Path(str(resources.files("twell.data") / "recorded"))
    except ModuleNotFoundError:
        return None
    return folder if folder.is_dir() else None


def find_runs() -> RunCatalog:
    """List the runs of the folder, newest first, then the runs of the package."""
    folder = runs_folder()
    listed, broken = list_runs(folder)
    runs: dict[str, Run] = {run.name: cached_run(run) for run in listed}
    recorded = recorded_folder()
    if recorded is not None and recorded.resolve() != folder.resolve():
        listed, more_broken = list_runs(recorded)
        runs |= {RECORDED + run.name: cached_run(run) for run in listed}
        broken |= {RECORDED + name: reason for name, reason in more_broken.items()}
    return RunCatalog(folder, runs, broken)


def run_label(name: str, catalog: RunCatalog) -> str:
    """Return a run's entry in the run chooser: its name, where it came from and its state."""
    run = catalog.runs.get(name)
    if run is None:
        return name
    state = "" if run.manifest.status == "complete" else f" · {run.manifest.status}"
    state += " · summary only" if run.manifest.summary_only else ""
    return (f"{run.name} (bundled)" if name.startswith(RECORDED) else run.name) + state
