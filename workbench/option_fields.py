"""Declare a field of a dataclass that is also a command-line option, and check the values in such fields."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, field, fields
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from twell.workbench.errors import UserError

TYPES: dict[Any, tuple[type, ...]] = {float: (int, float)}  # what fits where another type is declared
FLAG = re.compile(r"--(no-)?([a-z][a-z-]*)(?:( )([\w.]*\w))?")  # in a sentence, with the word that follows
WORDS = {int: "an int", float: "a float", bool: "True or False", str: "a str", Path: "a Path"}


def option(
    default: Any = MISSING,
    *,
    help: str,
    unit: str = "",
    value: str = "",
    argument: bool = False,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """Return a dataclass field that is also a command-line option, or an argument by position.

    value: its placeholder in the help, by default by its type (N, X, PATH, TEXT); least, most: the bounds of a number
    """
    about = {"help": help, "unit": unit, "value": value, "argument": argument, "least": least, "most": most}
    return field(default=default, metadata=about)


def plain_values(options: dict[str, Any]) -> dict[str, Any]:
    """Return options by name with scalars of NumPy and torch, which arrays and DataFrames give, as Python's."""
    # by their shape: the command line's help would wait for NumPy
    return {name: value.item() if getattr(value, "shape", None) == () else value for name, value in options.items()}


@contextmanager
def python_names(options: type, **others: str) -> Iterator[None]:
    """Have errors inside name options as arguments: seq_len= for --seq-len, loss=False for --no-loss; also a decorator.

    What stands in backticks is a command, and stays. options: the dataclass of a command, others: by its field's name
    the argument's, where that is another
    """
    try:
        yield
    except UserError as error:
        pieces = str(error).split("`")
        pieces[::2] = [FLAG.sub(partial(_argument, get_type_hints(options), others), piece) for piece in pieces[::2]]
        error.args = ("`".join(pieces),)
        raise


def _argument(kinds: dict[str, Any], others: dict[str, str], flag: re.Match[str]) -> str:
    """Return an option in a sentence as Python's argument, with the value that follows it; another command's as it is.

    kinds: types of the options by field; others: as `python_names` takes them
    """
    off, name, space, word = flag.groups(default="")
    field = name.replace("-", "_")
    if field not in kinds:
        return flag[0]
    argument = others.get(field, field)
    if kinds[field] is bool:
        return f"{argument}={not off}{space}{word}"
    if word and _fits(word, kinds[field]) and get_origin(kinds[field]) is Literal:
        return f'{argument}="{word}"'
    return f"{argument}={word}" if word[:1].isdigit() else f"{argument}={space}{word}"


def check_bounds(options: Any, from_python: bool = False) -> None:
    """Raise UserError for the first number in a command's options that is below its `least` or above its `most`.

    from_python: whether the options were given as arguments, by which the error then calls them; their types are
    checked then too, as the command line does by itself
    """
    if from_python:
        _check_types(options)
    for item in fields(options):
        value, least, most = getattr(options, item.name), item.metadata["least"], item.metadata["most"]
        known = least is not None and value is not None
        if known and (not least <= value <= (math.inf if most is None else most) or value == math.inf):
            bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
            name = f"{item.name}=" if from_python else f"--{item.name.replace('_', '-')}"
            raise UserError(f"Expected {name} {bounds}, got {value}.")


def _check_types(options: Any) -> None:
    """Raise UserError for the first option whose value is of another type than it is declared with."""
    declared = get_type_hints(type(options))
    for item in fields(options):
        value = getattr(options, item.name)
        check_type(item.name, value, declared[item.name])


def check_type(name: str, value: Any, kind: Any) -> None:
    """Raise UserError for an argument whose value is of another type than it is declared with. kind: that type"""
    if not _fits(value, kind):
        raise UserError(f"Expected {name}= as {_words(kind)}, got {value!r}.")


def _fits(value: Any, kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is Literal:
        return value in get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in get_args(kind))
    if isinstance(value, bool):
        return kind is bool
    if origin is Sequence:
        return isinstance(value, Sequence) and all(_fits(one, *get_args(kind)) for one in value)
    return isinstance(value, TYPES.get(kind, (origin or kind,)))


def _words(kind: Any) -> str:
    """Return what a value is to be, in words."""
    if get_origin(kind) is Literal:
        return f"one of {', '.join(get_args(kind))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(_words(one) for one in get_args(kind) if one is not NoneType)
    if get_origin(kind) is Sequence:
        return f"a list, each {_words(*get_args(kind))}"
    return WORDS.get(kind, f"a {getattr(kind, '__name__', kind)}")
