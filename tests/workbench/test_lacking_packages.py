"""An install without extras, or with one of them: a command that needs the other says which in a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# An import of a package whose name is in the first argument fails, as where it is not installed.
PROGRAM = """
import importlib.util, sys
lacking, sys.argv = sys.argv[1].split(","), ["twell", *sys.argv[2:]]
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in lacking:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in lacking else find_spec(name, package)
from twell.workbench.cli import main
main()
"""
CAPTURE = ["capture", "builtin:demo", "--text", "builtin:passages", "--out", "runs/new"]


@pytest.mark.parametrize(
    ("lacking", "command", "sentence"),
    [
        ("torch", ["doctor"], "the package torch, it is not installed: pip install 'twell-workbench[capture]'"),
        ("torch", CAPTURE, "the package torch, it is not installed: pip install 'twell-workbench[capture]'"),
        ("transformers", CAPTURE, "the package transformers, it is not installed: pip install 'twell-workbench[capt"),
        ("streamlit", ["app"], "the package streamlit, it is not installed: pip install 'twell-workbench[dashboard]'"),
        ("streamlit", ["demo"], "the package streamlit, it is not installed: pip install 'twell-workbench[dashboard]'"),
        ("scipy,ibis", ["tokens", "runs/new"], "the package scipy, it is not installed: pip install 'twell-workbench"),
        ("pyarrow", ["check", "runs/new"], "the package pyarrow, it is not installed: pip install pyarrow"),
    ],
)
def test_what_is_not_installed_is_named(lacking: str, command: list[str], sentence: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, lacking, *command], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 2, done.stderr
    assert f"twell: Expected {sentence}" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "runs" / "new").exists()


def test_a_module_of_its_own_that_is_gone_is_a_fault(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "none", "doctor"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    program = PROGRAM.replace("in lacking:", "in lacking or name == 'twell.workbench.doctor':")
    done = subprocess.run(
        [sys.executable, "-c", program, "none", "doctor"], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1 and "Traceback" in done.stderr
