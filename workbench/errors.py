"""Errors for the person who runs a command or opens a page.

Each message is one sentence: what was expected, what came, what to do. The command line prints it and exits with code
2; the dashboard shows it in place of the figure or table. Whatever names a message quotes, it stays on one line, and
short enough to read.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LONGEST = 900  # characters of a message
NUMBERS = {"int": "a whole number", "float": "a number"}  # by the type that a value is parsed as
EXTRAS = {  # of the package, by what they bring
    "capture": ("torch", "transformers", "tokenizers", "safetensors"),
    "dashboard": ("streamlit", "plotly", "ibis", "duckdb", "sqlglot", "scipy"),
}
REFUSALS = {  # what to do about what the system refuses a person, by its error
    errno.EACCES: "choose a place that you may use",
    errno.EPERM: "choose a place that you may use",
    errno.EROFS: "choose a place that can be written to",
    errno.ENOSPC: "free some room, or choose a place that has it",
    errno.EDQUOT: "free some room, or choose a place that has it",
    errno.EIO: "check the disk",
    errno.EMFILE: "allow more open files, as with `ulimit -n 4096`",
}
NAME, NAMES = 60, 12  # characters of a quoted name, and how many are quoted


class UserError(Exception):
    """Something outside the program is wrong: an argument, a file, a model, a disk.

    message: one sentence; its control characters are escaped, and what is longer than LONGEST is cut in the middle
    """

    def __init__(self, message: str) -> None:
        text = escaped(message)
        half = LONGEST // 2
        super().__init__(text if len(text) <= LONGEST else f"{text[:half]} … {text[-half:]}")


class Missing(UserError):
    """A run lacks what a question needs: a table it never recorded, or rows that a summary-only run leaves out."""


def escaped(text: str) -> str:
    """Return text with what cannot be printed (line breaks, control characters, half surrogate pairs) as escapes."""
    if text.isprintable():
        return text
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)


def quoted(names: Iterable[str]) -> str:
    """Return names from a person's file for a message: NAMES of them at most, each cut to NAME characters."""
    every = list(names)
    listed = [name if len(name) <= NAME else f"{name[:NAME]}…" for name in every[:NAMES]]
    more = f" and {len(every) - NAMES} more" if len(every) > NAMES else ""
    return ", ".join(listed) + more if listed else "(none)"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none, as part of a sentence."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(" .:")


def utf8(name: str | Path) -> str:
    """Return the name of a file or folder as text. Raises UserError for one that is not UTF-8: no manifest or table
    could record it."""
    try:
        str(name).encode()
    except UnicodeEncodeError:
        advice = _on_undecoded(str(name))
        raise UserError(f"Expected a name in UTF-8, got {str(name)!r}: {advice}.") from None
    return str(name)


def _on_undecoded(name: str) -> str:
    """Return what to do about a name that Python could not decode: its bytes are UTF-8 where the locale is at fault."""
    try:
        os.fsencode(name).decode()
    except UnicodeError:
        return "rename it"
    return f"it is, but the locale reads names as {sys.getfilesystemencoding()}; set PYTHONUTF8=1, or LC_ALL=C.UTF-8"


def path_of(given: str | os.PathLike[str], wanted: str) -> Path:
    """Return the path that an argument names. wanted: what it names, in the sentence. Raises UserError for what is no
    path, and for an empty one, which would be the folder that the process runs in."""
    with suppress(TypeError):
        if given != "":
            return Path(given)
    raise UserError(f"Expected {wanted}, got {given!r}: give its path, as 'runs/mine'.")


def usable(path: str | Path) -> Path:
    """Return the path of a file or folder. Raises UserError for one that the system cannot hold, or not in UTF-8."""
    name = utf8(path)
    try:
        os.lstat(name)
    except ValueError:
        raise UserError(f"Expected a name without a null character, got {name!r:.{NAME}}: correct it.") from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise UserError(too_long(name)) from None
    return Path(name)


def too_long(name: str) -> str:
    """Return the sentence for the name of a file or folder that the system cannot hold."""
    return (
        f"Expected a name that the system can hold, got one of {len(name):,} characters ({name[:NAME]}…): shorten it."
    )


def no_temporary_folder(error: OSError) -> str:
    """Return the sentence for temporary files that have no place; "" for any other error."""
    if "usable temporary directory" not in str(error.strerror):  # what Python's tempfile says
        return ""
    return "Expected a folder for temporary files, found none that can be written to: set TMPDIR to one with room."


def refused(error: OSError) -> str:
    """Return the sentence for what the system refuses a person: a name, a place, room; "" for any other error."""
    if error.errno == errno.ENAMETOOLONG:
        return too_long(str(error.filename))
    if sentence := no_temporary_folder(error):
        return sentence
    advice = REFUSALS.get(error.errno or 0)
    place = "files and standard output" if error.filename is None else str(error.filename)
    return f"Expected to read and write {place}, got {error.strerror}: {advice}." if advice else ""


def not_installed(module: str) -> str:
    """Return the sentence for a module that cannot be imported, with what installs it."""
    package = module.partition(".")[0]
    extra = next((extra for extra, brings in EXTRAS.items() if package in brings), None)
    install = package if extra is None else f"'twell-workbench[{extra}]'"
    return f"Expected the package {package}, it is not installed: pip install {install}."


def import_for_use(name: str) -> Any:
    """Import a module of this package; the error about a library that it needs and that is not installed says what
    installs it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("twell"):
            raise
        raise ModuleNotFoundError(not_installed(error.name), name=error.name) from None


def lacking(extra: str) -> list[str]:
    """Return the packages that an extra of the package brings and that are not installed here."""
    return [package for package in EXTRAS[extra] if find_spec(package) is None]


def print_error(message: str) -> None:
    """Print a message on standard error, and have torchrun end its report with it, if that started this process."""
    print(message, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with suppress(OSError), open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)


def wrong_line(error: Any) -> str:
    """Return the sentence for anything else that is wrong with a command line."""
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "twell"
    return f"{error.format_message().rstrip('.')}: see `{path} --help`."


def wrong_value(error: Exception) -> str:
    """Return a sentence about a value that is not of its option's type; "" for any other error of a command line."""
    option = getattr(error, "param", None)
    problems: list[Any] = getattr(error.__cause__, "errors", list)()
    if option is None or not problems:
        return ""
    problem = problems[0]
    words = problem["msg"].partition(" is not one of ")[2].rstrip(".")
    expected = NUMBERS.get(problem["type"].partition("_")[0]) or (f"one of {words}" if words else "")
    return f"Expected {expected} for {option.opts[0]}, got {problem['input']!r}." if expected else ""
