"""Names: one word, one thing. No two classes or type aliases of the product have the same name, private ones included,
and no two modules say that they are the same.

Each rule is a function over a tree of files, so that a test can hand it a tree that breaks the rule and see it fail.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.import_graph import python_files

ROOT = Path(__file__).resolve().parents[2]


def type_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of a file's classes, and of its type aliases: names in CamelCase that stand for something.

    Type variables are left out, as each holds within one signature.
    """
    yield from (node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and "TypeVar" not in ast.unparse(node):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
            bound = [name.id for name in names if isinstance(name.ctx, ast.Store)]
            yield from (name for name in bound if name.lstrip("_")[:1].isupper() and not name.isupper())


def shared_names(root: Path) -> list[str]:
    """Return a sentence for each name that several types have; `_Plan` and `Plan` are one name to who reads them."""
    places = defaultdict(list)
    for path in python_files(root):
        for name in type_names(ast.parse(path.read_text(encoding="utf-8"))):
            places[name.lstrip("_")].append(path.relative_to(root).as_posix())
    return [f"{name} is a type in {' and '.join(files)}" for name, files in sorted(places.items()) if len(files) > 1]


def shared_docstrings(root: Path) -> list[str]:
    """Return a sentence for each docstring that several modules have."""
    places = defaultdict(list)
    for path in python_files(root):
        places[ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))].append(path.relative_to(root).as_posix())
    return [f"{' and '.join(files)} say: {text}" for text, files in places.items() if len(files) > 1]


def test_each_module_says_what_it_is(tmp_path: Path) -> None:
    assert shared_docstrings(ROOT) == []
    for room in ("kernels", "analysis"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text('"""Timing."""\n')
    assert shared_docstrings(tmp_path) == ["analysis/__init__.py and kernels/__init__.py say: Timing."]


def test_each_type_has_a_name_of_its_own() -> None:
    assert shared_names(ROOT) == [], "say more precisely what each of them is"


@pytest.mark.parametrize(
    ("file", "line", "name"),
    [
        ("app/text/choices.py", "class Choice: ...", "Choice"),
        ("kernels/dispatch.py", "class _Choice: ...", "Choice"),
        ("workbench/run/store.py", "if True:\n    class Choice(Exception): ...", "Choice"),
        ("analysis/memo.py", "def f():\n    class Choice: ...", "Choice"),
        ("analysis/memo.py", "Choice = list[int]", "Choice"),
        ("app/main.py", "_Other: TypeAlias = dict[str, int]", "Other"),
    ],
)
def test_a_name_of_two_types_is_seen(tmp_path: Path, file: str, line: str, name: str) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "ops.py").write_text("class Choice: ...\nclass Other: ...\n")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(line.replace(name, "Chosen") + "\n")
    assert shared_names(tmp_path) == []
    (tmp_path / file).write_text(line + "\n")
    assert shared_names(tmp_path) == [f"{name} is a type in {' and '.join(sorted(['kernels/ops.py', file]))}"]
