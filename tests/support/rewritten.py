"""Bring a run's manifest, or the list beside its summaries, in line with files that a test has rewritten."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from twell.workbench.run import manifest as manifests
from twell.workbench.run.part_files import checksum
from twell.workbench.run.store import Run, open_run


def relisted(run: Run, table: str) -> Run:
    """List the parts of a table as their files are now, and open the run again."""
    parts = [
        replace(
            part,
            rows=pq.read_metadata(run.path / part.file).num_rows,
            bytes=(run.path / part.file).stat().st_size,
            sha256=checksum(run.path / part.file),
        )
        if part.table == table
        else part
        for part in run.manifest.parts
    ]
    manifests.update(run.path, parts=parts)
    return open_run(run.path)


def forget_checksums(run: Run) -> Run:
    """Take the checksums of the summaries from their list and from the manifest, which those of before have not got
    either; return the run, opened again."""
    built = run.summary_path("any").parent / "built.json"
    stored = {name: value for name, value in json.loads(built.read_text()).items() if name not in ("files", "sha256")}
    built.write_text(json.dumps(stored))
    manifests.update(run.path, summaries={})
    return open_run(run.path)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the fields of a manifest in its file, and take its checksum away as a person who edits it has to."""
    path = folder / manifests.FILE
    data = json.loads(path.read_text())
    change(data)
    data.pop("sha256", None)
    path.write_text(json.dumps(data))
