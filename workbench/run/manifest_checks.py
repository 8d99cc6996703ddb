"""Refuse a manifest that names files outside its folder, or has numbers that no run has, before either is used.

A run may come from anywhere, and all code that reads, copies or removes files of a run trusts the list in its manifest.
Cost: 5 µs a part.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from twell.workbench.errors import UserError

FILE_NAME = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)?\.parquet")  # TABLE.parquet or TABLE/NAME.parquet
MAX_LAYERS, MAX_NEURONS = 2**14, 2**24
MAX_COUNT = 2**53  # tokens, sequences, rows, bytes
ADVICE = "copy the run again from where it was recorded."


def check_numbers(path: Path, data: dict[str, Any]) -> None:
    """Raise UserError for sizes that no model has and for counts that no run has.

    path: the manifest, for the message; data: its content.
    """
    model, parts = data.get("model"), data.get("parts", [])
    if not isinstance(model, dict) or not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise UserError(
            f"Expected a manifest at {path} with a model and a list of parts, got others in their place: {ADVICE}"
        )
    for name, maximum in (("layers", MAX_LAYERS), ("d_ff", MAX_NEURONS)):
        _check_number(path, name, model.get(name), 1, maximum)
    for name in ("tokens", "sequences"):
        _check_number(path, name, data.get(name, 0), 0, MAX_COUNT)
    for part in parts:
        for name in ("rows", "bytes"):
            _check_number(path, name, part.get(name, 0), 0, MAX_COUNT)


def check_files(folder: Path, files: Iterable[object]) -> None:
    """Raise UserError for a file of a part outside the run's folder, whether by its name or because it is a link.

    folder: the run's; files: as the manifest names them.
    """
    links: dict[Path, bool] = {}  # by folder of a table: whether it is a link
    for file in files:
        if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
            raise _elsewhere(folder, file)
        path = folder / file
        if path.parent not in links:
            links[path.parent] = path.parent != folder and path.parent.is_symlink()
        if (links[path.parent] or path.is_symlink()) and not is_within(path, folder):
            raise _elsewhere(folder, file)


def is_within(path: Path, folder: Path) -> bool:
    """Return whether a path, with its links followed, lies in a folder."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _check_number(path: Path, name: str, value: object, minimum: int, maximum: int) -> None:
    if type(value) is not int or not minimum <= value <= maximum:
        got = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "a longer number"
        raise UserError(f"Expected {name} from {minimum} to {maximum:,} in the manifest {path}, got {got}: {ADVICE}")


def _elsewhere(folder: Path, file: object) -> UserError:
    return UserError(
        f"Expected a manifest in {folder} that lists files of its own folder, got {file!r}: use the run as it was "
        "recorded, and trust no other."
    )
