"""Errors for the person who runs a command or opens a page.

Each message is one sentence: what was expected, what came, what to do. The command line prints it and exits with code
2; the dashboard shows it in place of the figure or table.
"""

from __future__ import annotations

from pathlib import Path


class UserError(Exception):
    """Something outside the program is wrong: an argument, a file, a model, a disk."""


class Missing(UserError):
    """A run lacks what a question needs: a table it never recorded, or rows that a summary-only run leaves out."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none, as part of a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")


def utf8(name: str | Path) -> str:
    """Return the name of a file or folder as text. Raises UserError for one that is not UTF-8: no manifest or table
    could record it."""
    try:
        str(name).encode()
    except UnicodeEncodeError:
        raise UserError(f"Expected a name in UTF-8, got {str(name)!r}: rename it.") from None
    return str(name)
