"""The layout of C++ and CUDA sources: clang-format's, within 120 columns."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "kernels" / ".clang-format"
COLUMNS = 120
SUFFIXES = {".cpp", ".cu", ".cuh", ".h"}


def sources(root: Path) -> list[Path]:
    """List the C++ and CUDA files below a root's kernels."""
    return sorted(path for path in (root / "kernels").rglob("*") if path.suffix in SUFFIXES)


def long_lines(root: Path) -> list[str]:
    """Return the place of each line past the limit: clang-format leaves those that it cannot break."""
    return [
        f"{path.relative_to(root).as_posix()}:{number}"
        for path in sources(root)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > COLUMNS
    ]


def laid_out_otherwise(files: list[Path]) -> str:
    """Return what clang-format says of files that it would change; empty if there is none."""
    pytest.importorskip("clang_format")
    program = "import clang_format; clang_format.clang_format()"
    command = [sys.executable, "-c", program, "--dry-run", "-Werror", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (done.stderr == ""), done.stderr
    return done.stderr


def test_lines_end_in_time() -> None:
    assert long_lines(ROOT) == []


def test_a_long_line_is_seen(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cuh").write_text(f"int a;\n// {'b' * 117}\n// {'ö' * 118}\n", encoding="utf-8")
    assert long_lines(tmp_path) == ["kernels/a.cuh:3"]


def test_sources_are_laid_out() -> None:
    assert laid_out_otherwise(sources(ROOT)) == ""


@pytest.mark.parametrize("text", ["int  a;\n", f"int {'b' * 60} = {'c' * 60};\n", "  #pragma unroll\nint a;\n"])
def test_another_layout_is_seen(tmp_path: Path, text: str) -> None:
    shutil.copy(CONFIG, tmp_path)
    file = tmp_path / "a.cuh"
    file.write_text("#pragma unroll\nint a;\n")
    assert laid_out_otherwise([file]) == ""
    file.write_text(text)
    assert "should be clang-formatted" in laid_out_otherwise([file])
