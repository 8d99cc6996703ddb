"""Read the structure of a source tree from its text: which file imports which, and how long functions are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("kernels", "workbench", "analysis", "app")
PACKAGE = "twell"

ATTRIBUTES = {"__launch_bounds__", "__cluster_dims__", "__align__", "alignas", "requires"}  # of C++, with parentheses

Graph = dict[str, set[str]]  # file → files that it imports, both relative to the root, as POSIX paths


def python_files(root: Path, folders: Iterable[str] = FOLDERS) -> list[Path]:
    """List the Python files below the folders of a root, in order of their paths."""
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def imported_names(path: Path) -> set[str]:
    """Return the full names that a file imports, at its top, inside functions and under TYPE_CHECKING.

    `from a.b import c` gives both `a.b` and `a.b.c`, as `c` may be a module. Relative imports are refused.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: expected imports by full name (twell.…), got a relative one"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def import_graph(root: Path) -> Graph:
    """Return the imports between the Python files of a root.

    `from twell.a import b` is an edge to `a/b.py` where that file exists, else to `a/__init__.py` or `a.py`: a file
    that takes a name from a package depends on whatever the package's own file imports.
    """
    graph: Graph = {}
    for path in python_files(root):
        targets: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                targets |= {target for alias in node.names if (target := _file_of(root, alias.name))}
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    target = _file_of(root, f"{node.module}.{alias.name}") or _file_of(root, node.module)
                    if target:
                        targets.add(target)
        graph[path.relative_to(root).as_posix()] = targets
    return graph


def _file_of(root: Path, module: str) -> str | None:
    """Return the file of a module of the package, relative to the root; None where there is none."""
    first, _, rest = module.partition(".")
    if first != PACKAGE or not rest:
        return None
    base = root / rest.replace(".", "/")
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path.relative_to(root).as_posix()
    return None


def cycles(graph: Graph) -> list[list[str]]:
    """Return the groups of files that import each other in a circle, each group sorted; empty for an acyclic graph.

    Tarjan's algorithm for strongly connected components, without recursion.
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []
    for start in graph:
        if start in index:
            continue
        index[start] = low[start] = len(index)
        stack.append(start)
        path: list[tuple[str, Iterator[str]]] = [(start, iter(sorted(graph[start])))]
        while path:
            file, targets = path[-1]
            target = next(targets, None)
            if target is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[file])
                if low[file] == index[file]:
                    at = stack.index(file)
                    group, stack[at:] = stack[at:], []
                    if len(group) > 1 or file in graph[file]:
                        groups.append(sorted(group))
            elif target not in index and target in graph:
                index[target] = low[target] = len(index)
                stack.append(target)
                path.append((target, iter(sorted(graph[target]))))
            elif target in stack:
                low[file] = min(low[file], index[target])
    return groups


@dataclass(frozen=True)
class Function:
    """A function definition: its file relative to the root, its name, its length in lines."""

    file: str
    name: str
    lines: int


def python_functions(root: Path) -> list[Function]:
    """List the functions of the Python files, with their lengths from `def` to the last line, docstrings left out."""
    functions = []
    for path in python_files(root):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0]
                text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                docstring = (first.end_lineno or 0) - first.lineno + 1 if text else 0
                lines = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring
                functions.append(Function(path.relative_to(root).as_posix(), node.name, lines))
    return functions


def device_functions(root: Path) -> list[Function]:
    """List the functions of the C++ and CUDA sources, with the number of lines between their braces, both included.

    Braces of namespaces, structs and enums are looked into; any other brace after a closing parenthesis opens a
    function.
    """
    functions = []
    for path in sorted((root / "kernels" / "csrc").rglob("*")):
        if path.suffix in {".cu", ".cuh", ".cpp", ".h"}:
            file = path.relative_to(root).as_posix()
            functions += [Function(file, *block) for block in _blocks(path.read_text(encoding="utf-8"))]
    return functions


def _blocks(source: str) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of lines of each function in a C++ source."""
    for skipped in (r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/\*.*?\*/', r"(?m:^[ \t]*#(?:[^\n]*\\\n)*[^\n]*)"):
        source = re.sub(skipped, lambda match: re.sub(r"[^\n]", " ", match[0]), source, flags=re.DOTALL)
    header, depth, start, name = "", 0, 0, ""
    for at, letter in enumerate(source):
        if depth:  # inside a function
            depth += (letter == "{") - (letter == "}")
            if not depth:
                yield name, source.count("\n", start, at) + 1
                header = ""
        elif letter == "{":
            container = re.search(r"\b(namespace|struct|class|enum|union)\b[^()]*$", header)
            if ")" in header and not container and "=" not in header.rpartition(")")[2]:
                depth, start = 1, at
                called = re.findall(r"([A-Za-z_~][\w:]*)\s*\(", header)
                name = next((word for word in called if word not in ATTRIBUTES), "?")
            header = ""
        elif letter in ";}":
            header = ""
        else:
            header += letter
