"""What is shown: the runs to choose from, the chosen run, and the address that carries every choice.

A run is looked up by its name among the runs that were found, never by joining a path, so an address cannot leave
the runs folder. Answers are cached by the run's path and the digest of its parts: a new part is a new key, and what
stands is never computed twice.
"""

from __future__ import annotations

import hashlib
import html
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module, resources
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlencode

import streamlit as st

from twell import analysis
from twell.app.ui.pages import PAGES
from twell.app.ui.run_cache import kept
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run, list_runs, open_run

RECORDED = "recorded/"
MANIFEST = "run.json"


@dataclass(frozen=True)
class Shelf:
    """The runs found, by the name that the address carries, and a sentence for each folder that is no readable run."""

    folder: Path
    runs: dict[str, Run]
    broken: dict[str, str]


def runs_folder() -> Path:
    """The folder that the dashboard was started on: its one argument, `runs` without one."""
    return Path(sys.argv[1] if len(sys.argv) > 1 else "runs")


def recorded_folder() -> Path | None:
    """Where the package keeps recorded runs, if it came with any."""
    try:
        folder = Path(str(resources.files("twell.data") / "recorded"))
    except ModuleNotFoundError:
        return None
    return folder if folder.is_dir() else None


def shelf() -> Shelf:
    """The runs of the folder, newest first, then the recorded runs of the package."""
    folder = runs_folder()
    runs, broken = list_runs(folder)
    found: dict[str, Run] = {run.name: kept(run) for run in runs}
    recorded = recorded_folder()
    if recorded is not None and recorded.resolve() != folder.resolve():
        more, worse = list_runs(recorded)
        found |= {RECORDED + run.name: kept(run) for run in more}
        broken |= {RECORDED + name: reason for name, reason in worse.items()}
    return Shelf(folder, found, broken)


def digest(run: Run) -> str:
    """Changes with every part that the run gains, and with its status."""
    parts = "".join(part.sha256 for part in run.manifest.parts)
    return hashlib.sha256(f"{run.manifest.status} {run.manifest.created} {parts}".encode()).hexdigest()[:16]


def opened(path: Path) -> Run:
    """A run as it stands now; its manifest is read anew only where its file is another than the last time.

    Raises UserError where there is no run, or a broken one.
    """
    try:
        stamp = (path / MANIFEST).stat()
    except OSError:
        return open_run(path)  # which says what is wrong
    return _opened(path, stamp.st_ino, stamp.st_mtime_ns, stamp.st_size)


@lru_cache(maxsize=64)
def _opened(path: Path, *stamp: int) -> Run:
    return kept(open_run(path))


@st.cache_data(max_entries=256, show_spinner=False)
def _answer(path: str, parts: str, module: str, question: str, arguments: dict[str, Any]) -> Any:
    return getattr(import_module(module), question)(opened(Path(path)), **arguments)


def ask(run: Run, question: str | Callable[..., Any], **arguments: Any) -> Any:
    """What `twell.analysis` answers about the run, or a function of this package that takes the run first; cached until
    the run changes.

    Raises Missing where the run lacks what the question needs, UserError where a file of it cannot be read.
    """
    if callable(question):
        module, name = question.__module__, question.__qualname__
    else:
        module, name = analysis.__name__, question
    try:
        return _answer(str(run.path), digest(run), module, name, arguments)
    except OSError as error:
        raise UserError(
            f"Expected the files of {run.name} to stay in place, got {error.strerror or error}: was the run moved or "
            "deleted? Choose another, or reload the page."
        ) from None


def parameter(name: str) -> str | None:
    """A query parameter of the address, or None."""
    return st.query_params.get(name)


def whole_number(text: str | None) -> int | None:
    """What is written as a whole number in ASCII digits, or None."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else None


@dataclass(frozen=True)
class Tie:
    """What ties a widget to the address: its key, the value that the address leaves out, what reads it there (None: not
    valid), and the parameters that say more of the value and go with it."""

    key: str
    default: Any
    read: Callable[[str], Any]
    more: tuple[str, ...] = ()

    def value(self, text: str | None) -> Any:
        """What the widget holds where the address says this of it, or (None) nothing."""
        value = None if text is None else self.read(text)
        return self.default if value is None else value


def enter(page: str) -> None:
    """Forget the ties of another page than the one that is about to be drawn."""
    if st.session_state.get("page") != page:
        st.session_state["page"], st.session_state["ties"] = page, {}


def tie(name: str, widget: Tie) -> None:
    """Have `keep` write a widget's value into the query parameter `name`."""
    st.session_state["ties"][name] = widget


def bound(key: str, default: Any, read: Callable[[str], Any], more: tuple[str, ...] = ()) -> dict[str, Any]:
    """Arguments that tie a widget to the address: its value is the query parameter `key`, read by `read` (None: not
    valid), or else the default, which the address leaves out. So links, and back and forward, restore it."""
    widget = Tie(key, default, read, more)
    st.session_state[key] = widget.value(parameter(key))
    tie(key, widget)
    return {"key": key, "on_change": keep}


def keep() -> None:
    """Write what the widgets of the page hold into the address: the callback of each widget that has the page drawn
    anew, its own value in the address or not.

    A run of the script begins with the address that the browser had when it asked for the run. Where it asked before
    it heard what became of a choice, that address lacks the choice, and to read it would undo the choice.
    """
    address = st.query_params.to_dict()
    before = dict(address)
    for name, widget in st.session_state.get("ties", {}).items():
        value = st.session_state.get(widget.key)
        if value is None or value == widget.value(address.get(name)):
            continue  # not drawn now, as under another view, or nothing chosen; or just what the address says
        text = None if value in (widget.default, "") else str(value)
        if text is not None and widget.read(text) is None:
            continue  # the label of an option that has another label by now
        for gone in (name, *widget.more):
            address.pop(gone, None)
        if text is not None:
            address[name] = text
    if address != before:
        st.query_params.from_dict(address)  # at once, so that it is one step of the browser's history


def draw_anew() -> NoReturn:
    """Draw the whole page anew from within a part that looks at something again and again."""
    keep()
    st.rerun()


def filters() -> dict[str, str]:
    """What of the address filters the list of tokens."""
    return {name: text for name in ("find", "least", "rank") if (text := parameter(name))}


def shown() -> Run:
    """The run that the page is about; the entry script has put it here."""
    run: Run = st.session_state["shown"]
    return run


def link(page: str, **query: Any) -> str:
    """The address of a page about the same run, as an attribute of HTML."""
    return html.escape(f"{page}?{urlencode({'run': st.session_state['run'], **query})}", quote=True)


def open_page(name: str, **parameters: Any) -> None:
    """Go to another page; the address carries the parameters."""
    st.switch_page(PAGES[name].file, query_params={key: str(value) for key, value in parameters.items()})
