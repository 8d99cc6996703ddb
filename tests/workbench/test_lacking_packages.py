"""An install without extras, or with one of them: a command that needs the other says which in a sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from twell.workbench import cli, errors
from twell.workbench.ablations import command
from twell.workbench.ablations.options import AblateOptions
from twell.workbench.capturing.progress import next_commands
from twell.workbench.errors import UserError
from twell.workbench.run.store import open_run

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


def test_a_run_is_checked_where_only_models_run(tmp_path: Path) -> None:
    """All of its parts; of its summaries, which such a machine cannot build, what installs their check."""
    run = Path(__file__).parents[2] / "data" / "recorded" / "h200-8x2048-text"
    lacking = ",".join(errors.EXTRAS["dashboard"])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, lacking, "check", run], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  whole\n") == len({part.table for part in open_run(run).manifest.parts})
    assert "whole, summaries not checked: pip install 'twell-workbench[dashboard]'" in done.stdout


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


def test_a_capture_without_the_dashboard_names_what_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that only runs models: `twell app` and `twell export` are for elsewhere, or after an install."""
    run: Any = SimpleNamespace(path=Path("runs/mine"), name="mine")
    assert "  twell app runs " in next_commands(run) and "pip" not in next_commands(run)
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "plotly" else name)
    lines = next_commands(run).splitlines()
    assert [line[:15] for line in lines] == ["  twell verify ", "  pip install '"]
    assert "'twell-workbench[dashboard]'" in lines[1] and "copy runs/mine to" in lines[1]


def test_an_ablation_without_the_dashboard_says_where_its_effects_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: Any = SimpleNamespace(path=Path("runs/mine"))
    monkeypatch.setattr(command, "ablate", lambda _: run)
    monkeypatch.delattr("twell.analysis.ablations.allocation", raising=False)  # first, as it imports it
    monkeypatch.setitem(sys.modules, "twell.analysis.ablations.allocation", None)
    cli.ablate(AblateOptions(target="runs/mine"))
    assert "runs/mine: recorded, in its table effects" in (line := capsys.readouterr().out)
    assert "'twell-workbench[dashboard]'" in line
    with pytest.raises(UserError, match=r"pip install "):
        cli.ablate(AblateOptions(target="runs/mine", budget=0.02))


def test_names_in_brackets_are_printed_as_they_are() -> None:
    """rich takes [dashboard], or a part of a folder's name, for a style, unless it is told not to."""
    root = Path(__file__).parents[2]
    files = [file for folder in ("workbench", "analysis") for file in (root / folder).rglob("*.py")]
    lines = [line for file in files for line in file.read_text("utf-8").splitlines() if " Console(" in line]
    assert len(lines) >= 8
    assert not [line for line in lines if "markup=False" not in line]


def test_python_without_an_extra_says_what_installs_it() -> None:
    """A notebook shows a run's `repr` where the analysis that fills its card is not installed."""
    program = PROGRAM.rpartition("from twell")[0]
    program += """
import twell.workbench as workbench
from twell.workbench.run.store import Run
import twell.analysis as analysis
for ask in (lambda: workbench.watch, lambda: Run.text(None), lambda: analysis.by_layer):
    try:
        ask()
    except ModuleNotFoundError as error:
        print(error)
print(Run._repr_html_(None))
"""
    done = subprocess.run([sys.executable, "-c", program, "torch,scipy"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "Expected the package torch, it is not installed: pip install 'twell-workbench[capture]'.",
        *["Expected the package scipy, it is not installed: pip install 'twell-workbench[dashboard]'."] * 2,
        "None",
    ]


def test_a_module_of_its_own_is_not_to_be_installed() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'twell\.nothing'"):
        errors.import_for_use("twell.nothing")
