"""Tell where the summaries of a run lie, and what was noted of its files: in its own folder, or in the user's cache.

A run that ships with the package, that git tracks, or that cannot be written to stays as it is. If its summaries are of
another revision than this package reads, those that are built anew go to the cache, and are found there by the next
process. What git tracks is read from its index, as git itself would do what a hostile folder configures. Cost: 10 µs;
once a run of such a revision, the time to read the index of a checkout.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from hashlib import sha256
from importlib import resources
from pathlib import Path

from twell.workbench.run.homes.cache_home import cache_home
from twell.workbench.run.schema import SUMMARIES

BUILT = "built.json"  # beside summaries: what they were built from


def summary_home(run: Path, summary_only: bool) -> Path:
    """Return the folder in which the folder `summary` of a run lies.

    summary_only: whether the run has no rows to build others from, so that there is nothing to write
    """
    if summary_only:
        return run
    built = run / "summary" / f"v{SUMMARIES.version}" / BUILT
    try:
        state = os.stat(built)
    except OSError:  # none yet: the run is new, or being packed
        return run if _is_writable(run) else _in_cache(run)
    if _revision(built, (state.st_mtime_ns, state.st_size)) == SUMMARIES.revision:
        return run
    return _in_cache(run) if _stays(run) else run


def notes_home(run: Path) -> Path:
    """Return the folder whose folder `summary` takes notes about the files of a run: the cache's for one that stays as
    it is, as `pip uninstall` leaves what it did not install."""
    return _in_cache(run) if _stays(run) else run


def _in_cache(run: Path) -> Path:
    return cache_home() / "summaries" / f"{run.name}-{sha256(os.path.realpath(run).encode()).hexdigest()[:12]}"


def _stays(run: Path) -> bool:
    """Return whether a run with summaries stays as it is."""
    return _ships(run) or _is_tracked(run) or not _is_writable(run)


def _is_writable(run: Path) -> bool:
    """Return whether a summary may be written into a run, as far as the rights to its folders tell."""
    summary = run / "summary"
    return os.access(summary if summary.exists() else run, os.W_OK)


@lru_cache(maxsize=256)
def _ships(run: Path) -> bool:
    """Return whether a run stands in the package's own folder of data."""
    return Path(os.path.realpath(run)).is_relative_to(os.path.realpath(str(resources.files("twell.data"))))


@lru_cache(maxsize=256)
def _is_tracked(run: Path) -> bool:
    """Return whether git tracks the manifest of a run, in the checkout that it lies in if there is one."""
    manifest = Path(os.path.realpath(run)) / "run.json"
    checkout = next((folder for folder in manifest.parents if (folder / ".git").exists()), None)
    if checkout is None:
        return False
    git = checkout / ".git"
    try:
        if git.is_file():  # of a further working tree, and of a submodule
            git = checkout / git.read_text(encoding="utf-8").partition("gitdir:")[2].strip()
        index = (git / "index").read_bytes()
    except (OSError, ValueError):
        return False
    return manifest.relative_to(checkout).as_posix().encode() + b"\0" in index


@lru_cache(maxsize=64)
def _revision(built: Path, state: tuple[int, int]) -> int:
    """Return the revision of the summaries beside a list, 0 where it tells none. state: changes with the file."""
    try:
        stored = json.loads(built.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return 0
    revision = stored.get("revision") if isinstance(stored, dict) else None
    return revision if isinstance(revision, int) else 0
