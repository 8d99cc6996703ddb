"""The Makefile on machines that lack something."""

from __future__ import annotations

import subprocess
from pathlib import Path

MAKEFILE = Path(__file__).parents[2] / "Makefile"
WITHOUT_PIP = """#!/bin/sh
[ "$1" = -m ] || exit 0
mkdir -p "$3/bin" && touch "$3/bin/python" && echo "ensurepip is not available" >&2 && exit 1
"""


def test_half_an_environment_is_not_taken_for_one(tmp_path: Path) -> None:
    """Debian's python3 without python3-venv leaves one without pip: the next `make` is to say so again."""
    (python := tmp_path / "python").write_text(WITHOUT_PIP)
    python.chmod(0o755)
    (tmp_path / ".ci").mkdir()
    for needed in ("pyproject.toml", ".ci/constraints.txt"):
        (tmp_path / needed).touch()
    for _ in range(2):
        command = ["make", "-f", str(MAKEFILE), "demo", f"PYTHON={python}"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "ensurepip is not available" in done.stderr
