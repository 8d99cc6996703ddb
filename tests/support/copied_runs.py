"""Copy a run that something else reads meanwhile: a page on show, or a test in another process."""

from __future__ import annotations

import shutil
from pathlib import Path


def copy_run(run: Path, folder: Path) -> Path:
    """Copy a run's files to a new folder; return it. Readers write down what they found whole, and files that are
    being written may have gone before they are copied."""
    return shutil.copytree(run, folder, ignore=shutil.ignore_patterns("*.tmp"))
