"""C++ and CUDA sources stay within 120 columns; `make format` leaves lines that it cannot break."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 120
SUFFIXES = {".cpp", ".cu", ".cuh", ".h"}


def sources(root: Path) -> list[Path]:
    """List the C++ and CUDA files below a root's kernels."""
    return sorted(path for path in (root / "kernels").rglob("*") if path.suffix in SUFFIXES)


def long_lines(root: Path) -> list[str]:
    """Return the place of each line past the limit."""
    return [
        f"{path.relative_to(root).as_posix()}:{number}"
        for path in sources(root)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > COLUMNS
    ]


def test_lines_end_in_time() -> None:
    assert long_lines(ROOT) == []


def test_a_long_line_is_seen(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "a.cuh").write_text(f"int a;\n// {'b' * 117}\n// {'ö' * 118}\n", encoding="utf-8")
    assert long_lines(tmp_path) == ["kernels/a.cuh:3"]
