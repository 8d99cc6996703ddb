"""Copy a run without the rows of single tokens: small, and its text cannot be read from it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.part_files import checksum
from twell.workbench.run.schema import SUMMARIES, TABLES
from twell.workbench.run.store import Run, open_run, refuse_existing


def copy_without_activity(source: Path, target: Path, without_damaged: bool = False) -> None:
    """Copy a summarised run as a summary-only run, from which its text cannot be read.

    source, target: the folders of the run and of its copy; without_damaged: as in `open_run`. Tables whose sums are in
    the summary (neurons, tiles, unions) are left out: they would be most of the copy. The manifest is written last, so
    what was cut short is not mistaken for a run. Raises UserError where it cannot be written.
    """
    refuse_existing(target)
    run = open_run(source, without_damaged)
    parts = [part for part in run.manifest.parts if TABLES[part.table].in_summary_only]
    manifest = replace(run.manifest, parts=parts, summary_only=True)
    if damaged := Run(source, manifest).damaged():
        raise UserError(f"Expected a whole run to copy, got: {damaged[0]} Copy it again from where it was recorded.")
    names = ["built.json", *(f"{name}.parquet" for name, table in SUMMARIES.tables.items() if table.in_summary_only)]
    built, summary = run.summary_path("any").parent, Path("summary") / f"v{SUMMARIES.version}"
    summaries = {summary / name: built / name for name in names if (built / name).is_file()}
    files = {Path(part.file): source / part.file for part in manifest.parts} | summaries
    try:
        for file, original in files.items():
            (target / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(original, target / file)
        manifest.summaries = {file.as_posix(): checksum(target / file) for file in summaries}
        manifests.write(target, manifest)
    except OSError as error:
        raise UserError(
            f"Expected to copy {source} to {target}, got {error.strerror or error}: free some space or choose a folder "
            "that can be written to, and remove what was begun."
        ) from None
