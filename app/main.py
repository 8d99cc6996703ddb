"""The dashboard's entry: the run chooser, the pages, and what is said when there is nothing to show.

`twell app RUNS` starts it; `streamlit run app/main.py -- RUNS` does too, with the settings of `.streamlit/config.toml`.
"""

from __future__ import annotations

from typing import Any

import streamlit as st

from twell.analysis.memo import memo_scope
from twell.app.server import warm_up
from twell.app.ui import empty_states, styles, theme, url_state, widgets
from twell.app.ui.pages import FRONT, PAGES
from twell.workbench.errors import UserError

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#2f7ed8"/>'
    '<g fill="#fff"><rect x="3" y="3" width="4" height="2"/><rect x="3" y="7" width="2" height="2"/>'
    '<rect x="3" y="11" width="7" height="2"/></g></svg>'
)


def address(found: url_state.Shelf) -> str:
    """The name of the run in the address, whether there is one or not; else of the run shown last, or the newest.
    From then on the address has it. A recorded run is found by its name alone, too, where no other has it."""
    name = url_state.parameter("run") or st.session_state.get("run") or next(iter(found.runs), "")
    if name not in found.runs and url_state.RECORDED + name in found.runs:
        name = url_state.RECORDED + name
    if url_state.parameter("run") != name:
        st.query_params["run"] = name
    st.session_state["run"] = name
    st.session_state["chooser"] = name if name in found.runs else None
    url_state.tie("run", url_state.Tie("chooser", None, lambda text: text if text in found.runs else None))
    return name


def to_front() -> None:
    """The front page under its name, as the other pages have theirs: on to the root."""
    url_state.open_page(FRONT, **st.query_params)


def bar(found: url_state.Shelf, links: dict[str, Any], name: str) -> None:
    """The pages, as links that keep the run, and the run chooser; under them what was run on what."""
    with st.container(horizontal=True, vertical_alignment="center", gap="small", key="bar"):
        with st.container(horizontal=True, gap="xsmall", width="stretch", key="nav"):
            for title, page in links.items():
                st.page_link(page, label=title, query_params={"run": name})
        st.selectbox(
            "Run",
            list(found.runs),
            index=None,
            key="chooser",
            on_change=url_state.keep,
            width=300,
            required=True,
            format_func=lambda name: widgets.run_label(name, found),
            label_visibility="collapsed",
            placeholder="Choose a run",
        )
    with st.container(horizontal=True, wrap=False, vertical_alignment="center", gap="small"):
        if name in found.runs:
            widgets.facts(found.runs[name])
            widgets.definition(found.runs[name])
        if found.broken:
            empty_states.unreadable_folders(found)


def main() -> None:
    """Draw the frame around every page, then the page."""
    st.set_page_config(page_title="TwELL workbench", page_icon=ICON, layout="wide", menu_items={"About": theme.ABOUT})
    st.html(theme.CSS + styles.CSS)
    pages = {
        name: st.Page(page.file, title=page.title, url_path="front" if name == FRONT else name, default=name == FRONT)
        for name, page in PAGES.items()
    }
    links = {PAGES[name].title: page for name, page in pages.items() if PAGES[name].in_bar}
    by_name = st.Page(to_front, title=PAGES[FRONT].title, url_path=FRONT)
    page = st.navigation([*pages.values(), by_name], position="hidden")
    found = url_state.shelf()
    if not found.runs and not found.broken:
        empty_states.no_runs(found)
        return
    url_state.enter(page.url_path)
    name = address(found)
    bar(found, links, name)
    if name not in found.runs:
        empty_states.not_found(found, name)
        return
    run = found.runs[name]
    st.session_state["shown"] = run
    widgets.status(run)
    try:
        if page.url_path != "kernels":  # timings need no summary, and a live run has a new one every part
            widgets.summarise(run)
        with memo_scope():  # what several figures of a page are made from is taken once
            page.run()
        warm_up.read_ahead(run)
    except (UserError, OSError) as error:
        empty_states.unreadable(run, error)


main()
