"""The house: which folder may import which, what must not be loaded, and how fast `twell --help` answers.

Each guard is a function over a tree of files, so that a test can hand it a tree that breaks the rule and see it fail.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.import_graph import imported_names

ROOT = Path(__file__).resolve().parents[2]

# folder -> what it may import of the others. "workbench.run" allows that room alone.
READERS = {f"workbench.{room}" for room in ("run", "errors", "garbage", "option_fields", "options")}
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "workbench": {"kernels"},
    "analysis": READERS,
    "app": {"analysis"} | READERS,
}
NEVER: dict[str, set[str]] = {
    "kernels": {"duckdb", "ibis", "streamlit", "plotly", "transformers", "pyarrow", "pandas"},
    "workbench": {"ibis", "streamlit", "plotly"},
    "analysis": {"torch", "transformers", "streamlit"},
    "app": {"torch", "transformers", "duckdb", "ibis"},
}
# The command line may import any folder, inside a command's function, by the names in its table. A watch asks the
# analysis about the run that it has made, inside one function.
FREE = {"workbench/cli.py", "workbench/watching/answers.py"}


def violations(root: Path) -> list[str]:
    """A sentence for each import that goes against the directions above."""
    sentences: list[str] = []
    for folder, allowed in MAY_IMPORT.items():
        for path in sorted((root / folder).rglob("*.py")):
            where = path.relative_to(root).as_posix()
            if where in FREE:
                continue
            for name in sorted(imported_names(path)):
                top = name.split(".")[0]
                if top in NEVER[folder]:
                    sentences.append(f"{where} imports {name}")
                if top == "twell" and name.count(".") >= 1:
                    target = name.removeprefix("twell.")
                    parts = target.split(".")
                    fine = parts[0] == folder or any(
                        target == a or target.startswith(a + ".") or a.startswith(target + ".") for a in allowed
                    )
                    if not fine:
                        sentences.append(f"{where} imports {name}")
    return sentences


def test_import_directions() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/x.py", "from twell.workbench.run import store"),
        ("workbench/x.py", "import twell.analysis"),
        ("workbench/x.py", "def f():\n    import streamlit"),
        ("analysis/x.py", "from twell.workbench.capturing.command import capture"),
        ("analysis/x.py", "from twell.workbench import models"),
        ("analysis/x.py", "import torch.nn"),
        ("app/x.py", "from twell.kernels import ops"),
        ("app/tokens/x.py", "import torch"),
    ],
)
def test_import_directions_can_fail(tmp_path: Path, file: str, line: str) -> None:
    for folder in MAY_IMPORT:
        (tmp_path / folder).mkdir()
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(line + "\n")
    assert len(violations(tmp_path)) >= 1


# Traces that plotly draws by WebGL, for which the page would have to evaluate text: the app's policy forbids it.
WEBGL = re.compile(r"(?i)\b(add_)?(scatter(polar)?gl|heatmapgl|scatter3d|surface|mesh3d|splom|parcoords)\b *[(\"']")


def webgl_traces(root: Path) -> list[str]:
    """The file and line of each trace that a browser could not draw in the app."""
    return [
        f"{path.relative_to(root).as_posix()}:{number}"
        for folder in ("analysis", "app")
        for path in sorted((root / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if WEBGL.search(line)
    ]


def test_no_figure_needs_webgl() -> None:
    assert webgl_traces(ROOT) == []


@pytest.mark.parametrize("line", ["figure.add_scattergl(", "go.Scattergl(x=x)", '{"type": "heatmapgl"}', "go.Surface("])
def test_a_trace_that_needs_webgl_is_seen(tmp_path: Path, line: str) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "x.py").write_text(f"import plotly\n{line}\n")
    assert webgl_traces(tmp_path) == ["app/x.py:2"]


def test_schema_is_a_leaf() -> None:
    run = "twell.workbench.run."
    leaves = tuple(
        run + name
        for name in (
            "schema",
            "columns",
            "summary_schema",
            "tables.scores",
            "tables.bench",
            "tables.effects",
            "tables.highest",
        )
    )
    for leaf in leaves:
        names = imported_names(ROOT / "workbench" / "run" / f"{leaf.removeprefix(run).replace('.', '/')}.py")
        assert not [n for n in names if n.split(".")[0] not in sys.stdlib_module_names and not n.startswith(leaves)]


def python(code: str, **environment: str) -> str:
    """The output of a fresh interpreter started at the repository root, which looks for no garbage."""
    code = "import atexit, gc; gc.disable(); atexit.register(gc.freeze)\n" + code
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


BLOCK = """
import sys, importlib, pkgutil
banned = {banned!r}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in banned:
            raise ImportError('not installed here: ' + name)
sys.meta_path.insert(0, Refuse())
{first}
from pathlib import Path
for folder in {folders!r}:
    for path in sorted(Path(folder).rglob('*.py')):
        if path.stem not in ('__main__', '__init__', 'main') and not path.stem.endswith('_page'):
            importlib.import_module('.'.join(['twell', *path.with_suffix('').parts]))
print('ok')
"""


# A top-level package called `kernels` would be taken for the hub's: there is none, and this would fail.
MODEL = "sys.path.insert(0, '.'); from transformers import LlamaForCausalLM"


@pytest.mark.parametrize(
    ("folders", "banned", "first"),
    [
        (["kernels", "workbench"], ["duckdb", "ibis", "streamlit", "plotly"], MODEL),
        (["analysis"], ["torch", "transformers", "streamlit"], ""),
        (["app"], ["torch", "transformers"], ""),
    ],
)
def test_each_half_imports_without_the_other(folders: list[str], banned: list[str], first: str) -> None:
    """From the repository's root. first: what is imported before the folders."""
    assert python(BLOCK.format(folders=folders, banned=banned, first=first)).strip().endswith("ok")


def test_blocked_imports_are_really_blocked() -> None:
    with pytest.raises(AssertionError, match="not installed here: torch"):
        python(BLOCK.format(folders=["kernels"], banned=["torch"], first=""))


def test_open_run_brings_nothing_heavy() -> None:
    loaded = python("import sys; from twell.workbench import open_run; print(' '.join(sys.modules))").split()
    assert not {"torch", "transformers", "duckdb", "ibis", "pandas", "streamlit"} & set(loaded)


def cpu_seconds(*command: str) -> float:
    """Return the user and system time of the fastest of five runs."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_help_is_quick() -> None:
    bare = cpu_seconds(sys.executable, "-c", "pass")
    assert cpu_seconds(sys.executable, "-m", "twell.workbench", "--help") < 11 * bare  # 5 today; pandas takes 16


def test_top_level_is_the_design() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    folders = {"kernels", "workbench", "analysis", "app", "tests", "data"}
    assert {t for t in top if not t.startswith(".")} == folders | {"pyproject.toml", "README.md", "Makefile", "LICENSE"}
    assert {t for t in top if t.startswith(".")} <= {".ci", ".github", ".gitignore", ".streamlit"}
    assert not (ROOT / "kernels" / "__init__.py").exists()
