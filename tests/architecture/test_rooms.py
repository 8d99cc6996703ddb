"""The rooms: imports run in one direction, files import each other in no circle, folders and functions stay small.

Each rule is a function over a tree of files, so that a test can hand it a tree that breaks the rule and see it fail.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.import_graph import (
    FOLDERS,
    Function,
    Graph,
    cycles,
    device_functions,
    import_graph,
    python_files,
    python_functions,
)

ROOT = Path(__file__).resolve().parents[2]

# Rooms (a folder, or a file without its ending) in levels: a file imports from its own level and from those before it.
LEVELS: dict[str, list[set[str]]] = {
    "kernels": [
        {"layout", "build"},
        {"params", "stats", "strongest", "predictions"},
        {"backends"},
        {"dispatch", "autograd", "calls"},
        {"ops", "training"},
        {"modules"},
        {"benchmark"},
    ],
    "workbench": [
        {"errors", "garbage", "option_fields", "options"},
        {"devices", "doctor", "interrupt", "power", "run", "models"},
        {"text"},
        {"capturing", "training"},
        {"watching", "worker"},
        {"bench", "verify", "ablations"},
        {"preflight"},
        {"cli"},
    ],
    "analysis": [
        {"statistics", "memo", "questions"},
        {"engines", "comparisons"},
        {"summaries"},
        {"activity", "training", "ablations"},
        {"tokens", "speed"},
        {"neurons"},
        {"claims"},
        {"overview", "compare", "changes", "passage", "checks", "shipped"},
        {"figures"},
        {"exports"},
    ],
    "app": [
        {"ui"},
        {"jobs", "frame"},
        {"ablations", "activity", "tokens", "text", "neurons", "speed", "training", "runs"},
        {"server"},
        {"main"},
    ],
}
# Within a level of subjects, no subject imports another, but for these.
SUBJECTS = {"app": LEVELS["app"][2]}
BETWEEN_SUBJECTS = {("neurons", "text")}
# A package's own file, the names that it gathers, and what Python runs for `-m` import the whole package; the command
# line names any folder.
ANY_LEVEL = {"__init__", "__main__", "api", "cli"}
# What other folders may import of `workbench`, beside `open_run` from the package itself.
OPEN_TO_OTHERS = {"run", "errors", "garbage", "option_fields", "options", "__init__"}

FILES_A_FOLDER = 13
UNREAD = {".pyc", ".typed"}  # files that nobody reads are not counted
PYTHON_LINES, HEADER_LINES = 300, 350
FUNCTION_LINES = 50
# Functions of the device code that stay longer than that, each with its reason.
LONGER: dict[tuple[str, str], str] = {
    ("kernels/csrc/hopper/few_rows/rows16_down.cuh", "rows16_down"): (
        "its sums, weights in flight and lists fill all 128 registers: with its loop in functions of a struct it spills"
    ),
}


def room(file: str) -> tuple[str, str]:
    """Return the folder and the room of a file: `analysis/speed/unions.py` is in ("analysis", "speed")."""
    folder, _, rest = file.partition("/")
    return folder, rest.partition("/")[0].removesuffix(".py")


def level(folder: str, name: str) -> int | None:
    """Return the level of a room in its folder, from 0; None where it has none."""
    return next((at for at, rooms in enumerate(LEVELS[folder]) if name in rooms), None)


def against_direction(graph: Graph) -> list[str]:
    """Return a sentence for each import that goes to a later level, between subjects, or to a closed room."""
    problems = []
    for file, targets in sorted(graph.items()):
        folder, name = room(file)
        if name not in ANY_LEVEL and level(folder, name) is None:
            problems.append(f"{file} is in no room that LEVELS knows")
            continue
        for target in sorted(targets):
            other, other_name = room(target)
            if other != folder:
                closed = other == "workbench" and other_name not in OPEN_TO_OTHERS and name != "cli"
                problems += [f"{file} imports {target}, which is closed to other folders"] if closed else []
            elif name in ANY_LEVEL or name == other_name:
                continue
            elif other_name in ANY_LEVEL:
                problems.append(f"{file} imports {target}, which imports the whole folder")
            elif level(folder, other_name) is None:
                continue  # the target has its own sentence
            elif (level(folder, other_name) or 0) > (level(folder, name) or 0):
                problems.append(f"{file} imports {target}, which is of a later level")
            elif {name, other_name} <= SUBJECTS.get(folder, set()) and (name, other_name) not in BETWEEN_SUBJECTS:
                problems.append(f"{file} imports {target}, another subject")
    return problems


def too_large(root: Path, functions: list[Function]) -> list[str]:
    """Return a sentence for each folder, file and function past its limit."""
    problems = []
    for folder in sorted({path.parent for top in FOLDERS for path in (root / top).rglob("*") if path.is_file()}):
        files = [path for path in folder.iterdir() if path.is_file() and path.suffix not in UNREAD]
        if len(files) > FILES_A_FOLDER and folder.name != "__pycache__":
            problems.append(f"{folder.relative_to(root)} holds {len(files)} files, more than {FILES_A_FOLDER}")
    sources = [(path, PYTHON_LINES) for path in python_files(root)]
    sources += [(path, HEADER_LINES) for path in sorted((root / "kernels").rglob("*.cuh"))]
    for path, limit in sources:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > limit:
            problems.append(f"{path.relative_to(root)} has {lines} lines, more than {limit}")
    for function in functions:
        if function.lines > FUNCTION_LINES and (function.file, function.name) not in LONGER:
            problems.append(f"{function.file}: {function.name} has {function.lines} lines, more than {FUNCTION_LINES}")
    return problems


def test_imports_run_in_one_direction() -> None:
    assert against_direction(import_graph(ROOT)) == []


TARGETS = (  # files that the imports below find
    "kernels/ops.py",
    "kernels/backends/cpu.py",
    "workbench/capturing/recorder.py",
    "workbench/text/batches.py",
    "analysis/__init__.py",
    "analysis/summaries/build.py",
    "app/jobs/runner.py",
    "app/speed/bench_view.py",
)


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("kernels/layout.py", "from twell.kernels.backends import cpu"),
        ("kernels/backends/cpu.py", "from twell.kernels.ops import gated_ffn"),
        ("workbench/run/store.py", "def f():\n    from twell.workbench.capturing import recorder"),
        ("workbench/models/load.py", "from twell.workbench.text.batches import Batch"),
        ("analysis/engines/duckdb.py", "from twell.analysis.summaries import build"),
        ("analysis/tokens/words.py", "from twell.analysis import by_layer"),
        ("analysis/claims/speed.py", "from twell.workbench.capturing import recorder"),
        ("app/ui/query.py", "from twell.app.jobs import runner"),
        ("app/tokens/token_page.py", "from twell.app.speed import bench_view"),
        ("app/odd.py", "import re"),
    ],
)
def test_a_wrong_direction_is_seen(tmp_path: Path, file: str, line: str) -> None:
    for name in TARGETS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    assert against_direction(import_graph(tmp_path)) == []
    (tmp_path / file).write_text(line + "\n")
    assert len(against_direction(import_graph(tmp_path))) == 1


def test_no_files_import_each_other_in_a_circle() -> None:
    assert cycles(import_graph(ROOT)) == []


def test_a_circle_is_seen(tmp_path: Path) -> None:
    """Through three files, one of which imports for its types alone; a file off the circle is not named."""
    (tmp_path / "analysis").mkdir()
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from twell.analysis.a import A\n"
    files = {
        "a": "from twell.analysis import b",
        "b": "def f():\n    import twell.analysis.c",
        "c": typed,
        "d": "from twell.analysis import a",
    }
    for name, text in files.items():
        (tmp_path / "analysis" / f"{name}.py").write_text(text)
    assert cycles(import_graph(tmp_path)) == [["analysis/a.py", "analysis/b.py", "analysis/c.py"]]
    (tmp_path / "analysis" / "c.py").write_text("")
    assert cycles(import_graph(tmp_path)) == []


def test_folders_files_and_functions_are_small() -> None:
    functions = [*python_functions(ROOT), *device_functions(ROOT)]
    assert too_large(ROOT, functions) == []
    lengths = {(function.file, function.name): function.lines for function in functions}
    assert [key for key in LONGER if lengths.get(key, 0) <= FUNCTION_LINES] == [], "no longer long, or gone"


def test_what_is_too_large_is_seen(tmp_path: Path) -> None:
    (tmp_path / "kernels" / "csrc").mkdir(parents=True)
    body = "\n".join(["  x = 1;"] * 60)
    struct = "struct B {\n  int c(int d) { return d; }\n};\n"
    header = f"namespace a {{\n{struct}__global__ void e(int f) {{\n{body}\n}}\n}}\n"
    (tmp_path / "kernels" / "csrc" / "e.cuh").write_text(header)
    for number in range(14):
        (tmp_path / "kernels" / f"f{number}.py").write_text("def g():\n" + "    x = 1\n" * (60 if number == 3 else 1))
    (tmp_path / "kernels" / "f0.py").write_text("x = 1\n" * 301)
    functions = [*python_functions(tmp_path), *device_functions(tmp_path)]
    assert too_large(tmp_path, functions) == [
        "kernels holds 14 files, more than 13",
        "kernels/f0.py has 301 lines, more than 300",
        "kernels/f3.py: g has 61 lines, more than 50",
        "kernels/csrc/e.cuh: e has 62 lines, more than 50",
    ]
