"""Refuse a manifest that names files outside its folder, or numbers that no run has, before anything is made of them.

A run may come from anywhere, and everything that reads, copies or removes its files goes by what its manifest lists.
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
MOST_LAYERS, MOST_NEURONS = 2**14, 2**24
MOST = 2**53  # tokens, sequences, rows, bytes
AGAIN = "copy the run again from where it was recorded."


def check_numbers(path: Path, data: dict[str, Any]) -> None:
    """Raise UserError for sizes that no model has and for counts that no run has. data: the content of `path`."""
    model, parts = data.get("model"), data.get("parts", [])
    if not isinstance(model, dict) or not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise UserError(
            f"Expected a manifest at {path} with a model and a list of parts, got others in their place: {AGAIN}"
        )
    for name, most in (("layers", MOST_LAYERS), ("d_ff", MOST_NEURONS)):
        _check_number(path, name, model.get(name), 1, most)
    for name in ("tokens", "sequences"):
        _check_number(path, name, data.get(name, 0), 0, MOST)
    for part in parts:
        for name in ("rows", "bytes"):
            _check_number(path, name, part.get(name, 0), 0, MOST)


def check_files(folder: Path, files: Iterable[object]) -> None:
    """Raise UserError for a file of a part that is not in the run's folder: by its name, or because it is a link."""
    links: dict[Path, bool] = {}  # of the folders of tables
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


def _check_number(path: Path, name: str, value: object, least: int, most: int) -> None:
    if type(value) is not int or not least <= value <= most:
        got = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "a longer number"
        raise UserError(f"Expected {name} from {least} to {most:,} in the manifest {path}, got {got}: {AGAIN}")


def _elsewhere(folder: Path, file: object) -> UserError:
    return UserError(
        f"Expected a manifest in {folder} that lists files of its own folder, got {file!r}: use the run as it was "
        "recorded, and trust no other."
    )
