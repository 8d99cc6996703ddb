"""The wheel: which files beside modules it holds, by the rules of pyproject.toml."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], set[str]]:
    """A function that returns the files beside modules that the wheel of a tree holds, by their paths in the tree."""

    def files(root: Path) -> set[str]:
        monkeypatch.chdir(root)
        wheel = apply_configuration(Distribution({"script_name": "setup.py"}), root / "pyproject.toml")
        build = wheel.get_command_obj("build_py")
        build.ensure_finalized()
        return {str(Path(folder, name)) for _, folder, _, names in build.data_files for name in names}

    return files


def test_type_checkers_read_the_annotations(held: Callable[[Path], set[str]]) -> None:
    typed = {name for name in held(ROOT) if name.endswith("py.typed")}
    assert typed == {"kernels/py.typed", "workbench/py.typed", "analysis/py.typed"}


def test_what_is_for_developers_stays_out(held: Callable[[Path], set[str]], tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    ships = {"CLAIMS.md", "studies/a/run.json"}
    stays = {
        "LOG.md",
        "log/app.md",
        "__pycache__/__init__.cpython-311.pyc",
        "recorded/__pycache__/ship.cpython-311.pyc",
    }
    for name in ships | stays:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).touch()
    assert {name.removeprefix("data/") for name in held(tmp_path)} == ships
