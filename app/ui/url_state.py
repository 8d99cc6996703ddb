"""The address of a page, which carries every choice: the run, and the value of each widget.

A link therefore opens what its sender saw, and the browser's back and forward buttons go through the choices made. A
choice takes one step: the widget's callback, `sync_url`, writes it into the address, and the next run of the page
reads it from there through `url_param`.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlencode

import streamlit as st

from twell.app.ui.pages import PAGES
from twell.workbench.run.store import Run

LONGEST_SAID = 20  # characters of an address's text that a sentence repeats


def parameter(name: str) -> str | None:
    """Return a query parameter of the address, or None."""
    return st.query_params.get(name)


def whole_number(text: str | None) -> int | None:
    """Return the number that a text of at most nine ASCII digits writes, or None for any other text."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else None


@dataclass(frozen=True)
class UrlParam:
    """The link between a widget and a query parameter of the address.

    Attributes:
        key: the widget's key in the session state.
        default: the widget's value if the address has no such parameter; the address leaves it out.
        read: turns the parameter's text into the widget's value, or into None if it is not valid.
        dependents: other parameters that only make sense with this value, and are removed when it changes.
    """

    key: str
    default: Any
    read: Callable[[str], Any]
    dependents: tuple[str, ...] = ()

    def value(self, text: str | None) -> Any:
        """Return the widget's value for a text of the address, or for None if the address lacks it."""
        value = None if text is None else self.read(text)
        return self.default if value is None else value


def enter_page(page: str) -> None:
    """Forget what the address asked for in vain, and the parameters of the page drawn before if it was another one."""
    st.session_state["unmet"] = []
    if st.session_state.get("page") != page:
        st.session_state["page"], st.session_state["params"] = page, {}


def register_param(name: str, param: UrlParam) -> None:
    """Have `sync_url` write a widget's value into the query parameter `name`."""
    st.session_state["params"][name] = param


def say_unmet(name: str, there_is: str, shown: str) -> None:
    """Have the page say that the address asks for what is not there.

    Args:
        name: the query parameter.
        there_is: what is there, as a clause.
        shown: what is shown in its place, as a clause.
    """
    text = parameter(name) or ""
    text = text if len(text) <= LONGEST_SAID else f"{text[:LONGEST_SAID]}…"
    st.session_state["unmet"].append(f"The address asks for {name} {text}; {there_is}: {shown}.")


def unmet() -> list[str]:
    """Return a sentence for each query parameter of the page that asks for what is not there."""
    sentences: list[str] = st.session_state["unmet"]
    return sentences


def url_param(
    key: str,
    default: Any,
    read: Callable[[str], Any],
    dependents: tuple[str, ...] = (),
    there_is: str = "here is no such choice",
) -> dict[str, Any]:
    """Set a widget from the address, and return the arguments that keep the two the same.

    Args:
        key: the widget's key, and the name of its query parameter.
        default, read, dependents: see UrlParam.
        there_is: what the choice offers, as a clause; said where the address asks for something else.

    Returns:
        `key` and `on_change`, to be passed to the widget.
    """
    param = UrlParam(key, default, read, dependents)
    text = parameter(key)
    st.session_state[key] = value = param.value(text)
    if text and (read(text) is None or (isinstance(value, int) and whole_number(text) not in (None, value))):
        say_unmet(key, there_is, f"{value} is shown")
    register_param(key, param)
    return {"key": key, "on_change": sync_url}


def one_of(options: Any) -> Callable[[str], str | None]:
    """Return a `read` for `url_param` that accepts the given options and nothing else."""
    return lambda text: text if text in options else None


def sync_url() -> None:
    """Write the values of the page's widgets into the address.

    It is the callback of every widget that has the page drawn again, whether its own value is in the address or not: a
    run of the script begins with the address that the browser had when it asked for the run. If the browser asked
    before it heard the outcome of an earlier choice, that address lacks the choice, and reading it would undo it.
    """
    address = st.query_params.to_dict()
    before = dict(address)
    for name, param in st.session_state.get("params", {}).items():
        value = st.session_state.get(param.key)
        if value is None or value == param.value(address.get(name)):
            continue  # the widget is not drawn now or has no choice, or the address says the same already
        text = None if value in (param.default, "") else str(value)
        if text is not None and param.read(text) is None:
            continue  # the label of an option that has another label by now
        for outdated in (name, *param.dependents):
            address.pop(outdated, None)
        if text is not None:
            address[name] = text
    if address != before:
        st.query_params.from_dict(address)  # all at once, so that it is one step of the browser's history


def redraw_page() -> NoReturn:
    """Draw the whole page again from within a fragment that runs on a timer."""
    sync_url()
    st.rerun()


def current_run() -> Run:
    """Return the run that the page is about, which `main.py` has put into the session."""
    run: Run = st.session_state["current_run"]
    return run


def run_name() -> str:
    """Return the name of the page's run as the address carries it."""
    return str(st.session_state["run"])


def link(page: str, **query: Any) -> str:
    """Return the address of a page about the same run, escaped as an attribute of HTML."""
    return html.escape(f"{page}?{urlencode({'run': run_name(), **query})}", quote=True)


def open_page(name: str, **parameters: Any) -> None:
    """Go to another page, with the given query parameters."""
    st.switch_page(PAGES[name].file, query_params={key: str(value) for key, value in parameters.items()})
