"""Runs whose files a test has written anew: the manifest, or the list beside the summaries, is brought in line."""

from __future__ import annotations

import json
from dataclasses import replace

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


def forget_checksums(run: Run) -> None:
    """Take the checksums of the summaries from their list, which those of before have not got either."""
    built = run.summary_path("any").parent / "built.json"
    built.write_text(json.dumps({**json.loads(built.read_text()), "files": {}}))
