"""The bar above every page: links to the pages in groups, a search, and the run chooser.

The bar stays in sight while the page scrolls. A search is answered where the run is open (`go_where_sought`): it leads
to a page, or a line under the bar says that nothing was found.
"""

from __future__ import annotations

import html
from typing import Any

import streamlit as st

from twell.app.frame.search import LONGEST, target
from twell.app.ui import empty_states, run_header, url_state, widgets
from twell.app.ui.pages import GROUPS, PAGES
from twell.app.ui.run_catalog import RunCatalog, run_label
from twell.workbench.run.store import Run

# keys of the session: the field, the address that it was used at with its text, whether that led on
SEARCH, SOUGHT, ARRIVED = "search", "sought", "arrived"


def draw_bar(catalog: RunCatalog, pages: dict[str, Any], name: str) -> None:
    """Draw the bar, and under it the facts about the run.

    Args:
        catalog: the runs to choose from.
        pages: Streamlit's pages by address.
        name: the chosen run, which the links keep.
    """
    run = catalog.runs.get(name)
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small", key="bar"):
        with st.container(horizontal=True, vertical_alignment="bottom", gap="small", width="stretch", key="nav"):
            for number, group in enumerate(GROUPS):
                _draw_group(number, group, pages, run)
        if run is not None:
            _draw_search()
        _draw_chooser(catalog)
    with st.container(horizontal=True, wrap=False, vertical_alignment="center", gap="small"):
        if run is not None:
            run_header.facts(run)
            run_header.definition(run)
        if catalog.broken:
            empty_states.unreadable_folders(catalog)


def _draw_group(number: int, group: str, pages: dict[str, Any], run: Run | None) -> None:
    """Draw a group of links with its name above them."""
    trained = run is not None and run.has("training")
    linked = {
        address: page for address, page in PAGES.items() if page.group == group and (trained or not page.of_training)
    }
    with st.container(gap=None, width="content", key=f"group-{number}"):
        if group:
            st.html(f'<div class="tw-group">{html.escape(group)}</div>', width="content")
        with st.container(horizontal=True, gap=None, width="content"):
            for address, page in linked.items():
                st.page_link(pages[address], label=page.title, query_params={"run": url_state.run_name()})


def _draw_search() -> None:
    """Draw the field of the search, empty once it has led to a page."""
    if st.session_state.pop(ARRIVED, False):
        st.session_state[SEARCH] = ""
    with st.form("search-form", border=False, width=210):  # what is typed asks for nothing before Enter
        st.text_input(
            "Find a token, a neuron as L3/N42, a place as 12:34, or words of the text",
            key=SEARCH,
            max_chars=LONGEST,
            label_visibility="collapsed",
            placeholder="Token, L3/N42 or words",
            icon=":material/search:",
        )
        st.form_submit_button("Find", key="search-now", on_click=_seek)


def _draw_chooser(catalog: RunCatalog) -> None:
    """Draw the choice of a run."""
    st.selectbox(
        "Run",
        list(catalog.runs),
        index=None,
        key="chooser",
        on_change=url_state.sync_url,
        width=280,
        required=True,
        format_func=lambda name: run_label(name, catalog),
        label_visibility="collapsed",
        placeholder="Choose a run",
    )


def _seek() -> None:
    url_state.sync_url()
    st.session_state[SOUGHT] = _address(), st.session_state[SEARCH]


def _address() -> tuple[str, dict[str, str]]:
    """Return the page and its parameters."""
    return st.session_state["page"], st.query_params.to_dict()


def go_where_sought(run: Run) -> None:
    """Open the page that the search asks for, if it was used at this address; draw a line where nothing was found.

    A click on a link may come before this run has: the link then leads to another address.
    """
    address, sought = st.session_state.pop(SOUGHT, (None, ""))
    if address != _address() or not sought.strip():
        return
    with widgets.scanning(run):
        found = target(run, sought)
    if found.page:
        st.session_state[ARRIVED] = True
        url_state.open_page(found.page, run=url_state.run_name(), **found.parameters)
    widgets.note(html.escape(found.reason))
