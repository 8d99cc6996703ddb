"""Tell where the summaries of a run lie: in its own folder, or in the user's cache.

A run that ships with the package stays as it is: in a checkout git tracks its files, and an installed package may not
be writable. If its summaries are of another revision than this package reads, those that are built anew go to the
cache, and are found there by the next process. Cost: 10 µs.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from hashlib import sha256
from importlib import resources
from pathlib import Path

from twell.workbench.run.schema import SUMMARIES

BUILT = "built.json"  # beside summaries: what they were built from


def summary_home(run: Path, summary_only: bool) -> Path:
    """Return the folder in which the folder `summary` of a run lies.

    summary_only: whether the run has no rows to build others from, so that there is nothing to write
    """
    if summary_only or not _ships(run):
        return run
    built = run / "summary" / f"v{SUMMARIES.version}" / BUILT
    try:
        state = os.stat(built)
    except OSError:  # none yet: the run is being packed
        return run
    if _revision(built, (state.st_mtime_ns, state.st_size)) == SUMMARIES.revision:
        return run
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twell" / "summaries"
    return cache / f"{run.name}-{sha256(os.path.realpath(run).encode()).hexdigest()[:12]}"


@lru_cache(maxsize=256)
def _ships(run: Path) -> bool:
    """Return whether a run stands in the package's own folder of data."""
    return Path(os.path.realpath(run)).is_relative_to(os.path.realpath(str(resources.files("twell.data"))))


@lru_cache(maxsize=64)
def _revision(built: Path, state: tuple[int, int]) -> int:
    """Return the revision of the summaries beside a list, 0 where it tells none. state: changes with the file."""
    try:
        stored = json.loads(built.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return 0
    revision = stored.get("revision") if isinstance(stored, dict) else None
    return revision if isinstance(revision, int) else 0
