"""Tell of an output folder whether `twell capture --resume` goes on with the run in it.

A capture that was stopped or killed can be gone on with; a training and a summary-only copy cannot. One that another
process records still is left alone. Cost: reading the manifest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from twell.workbench.errors import UserError, escaped, print_error, usable
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import COMPLETE, INTERRUPTED, Manifest
from twell.workbench.run.rank_share import RankShare


def refuse_unfinished(folder: Path) -> None:
    """Raise UserError that names --resume if a folder holds the run of a capture that did not come to its end, and one
    that does not where another process records it still: to remove that run would lose it."""
    manifest = _unfinished(usable(folder))
    if manifest is not None:
        with _claimed(folder):
            pass
        state = "was interrupted" if manifest.status == INTERRUPTED else "has no end yet"
        raise UserError(
            f"Expected an empty output folder, {folder} already holds a run that {state}: give the same command with "
            "--resume to go on with it, choose another folder or remove it first."
        )


def set_aside(folder: Path, status: str) -> Path:
    """Rename the folder of a run that did not come to its end, and return its new path.

    status: of that run, for the name. Raises UserError where another process records it still, which would find its
    folder gone.
    """
    with _claimed(folder):
        return folder.rename(folder.with_name(f"{folder.name}-{status}-{int(time.time())}"))


@contextmanager
def _claimed(folder: Path) -> Iterator[None]:
    """Lock a run's folder for the block. Raises UserError where another process records into it."""
    share = RankShare()
    share.claim(folder)
    try:
        yield
    finally:
        share.release()


@contextmanager
def telling_how_to_resume(folder: Path) -> Iterator[None]:
    """Print how the capture of a folder goes on if the block is stopped after it began; once for all ranks."""
    try:
        yield
    except KeyboardInterrupt:
        manifest = _unfinished(folder)
        if manifest is not None and os.environ.get("RANK", "0") == "0":
            kept = f"{folder} was interrupted and keeps {manifest.tokens:,} tokens"
            print_error(escaped(f"{kept}: give the same command with --resume to go on with it."))
        raise


def _unfinished(folder: Path) -> Manifest | None:
    """Return the manifest of a capture in a folder that did not come to its end, None for anything else."""
    try:
        manifest = manifests.read(folder)
    except UserError:
        return None
    ended = manifest.status == COMPLETE or manifest.only_trains or manifest.summary_only
    return None if ended else manifest
