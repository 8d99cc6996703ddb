"""Declare a field of a dataclass that is also a command-line option, and check the numbers in such fields."""

from __future__ import annotations

import math
from dataclasses import MISSING, field, fields
from typing import Any

from twell.workbench.errors import UserError


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


def check_bounds(options: Any, from_python: bool = False) -> None:
    """Raise UserError for the first number in a command's options that is below its `least` or above its `most`.

    from_python: whether the options were given as arguments, by which the error then calls them
    """
    for item in fields(options):
        value, least, most = getattr(options, item.name), item.metadata["least"], item.metadata["most"]
        known = least is not None and value is not None
        if known and (not least <= value <= (math.inf if most is None else most) or value == math.inf):
            bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
            name = f"{item.name}=" if from_python else f"--{item.name.replace('_', '-')}"
            raise UserError(f"Expected {name} {bounds}, got {value}.")
