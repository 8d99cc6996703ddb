"""What notebooks call says which errors it raises: a function of `twell.analysis` or `twell.workbench`, by its own
`raise` statements."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from twell import analysis, workbench
from twell.workbench.errors import Missing

SAID = ("Missing", "UserError", "Raises")


def silent(functions: Iterable[Callable[..., Any]]) -> list[str]:
    """Return the names of functions that raise an error of which their docstrings have no word."""
    names = []
    for function in map(inspect.unwrap, functions):
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        raises = any(isinstance(node, ast.Raise) and node.exc is not None for node in ast.walk(tree))
        if raises and not any(word in (function.__doc__ or "") for word in SAID):
            names.append(function.__name__)
    return names


@pytest.mark.parametrize("room", [analysis, workbench], ids=lambda room: room.__name__)
def test_functions_for_notebooks_say_what_they_raise(room: Any) -> None:
    functions = [value for name in room.__all__ if inspect.isfunction(value := getattr(room, name))]
    assert len(functions) > 5
    assert silent(functions) == []


def question(run: Any) -> None:
    """Return nothing."""
    raise Missing("No run has it.")


def test_a_function_that_says_nothing_is_seen() -> None:
    assert silent([question]) == ["question"]
