"""The dashboard's entry: the run chooser, the pages, and what is said when there is nothing to show.

`twell app RUNS` starts it; `streamlit run app/pages/main.py -- RUNS` does too, with the settings of
`.streamlit/config.toml`. It lies among the pages and not above them, because a folder called `pages` beside the entry
is what Streamlit takes for an older kind of app until the entry has run once.
"""

from __future__ import annotations

from typing import Any

import streamlit as st

from twell.analysis.shared import together
from twell.app import ahead, nothing, parts, state, styles, theme
from twell.workbench.errors import UserError

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#2f7ed8"/>'
    '<g fill="#fff"><rect x="3" y="3" width="4" height="2"/><rect x="3" y="7" width="2" height="2"/>'
    '<rect x="3" y="11" width="7" height="2"/></g></svg>'
)
PAGES = {
    "overview": "Overview",
    "text": "Text",
    "tokens": "Tokens",
    "layers": "Layers",
    "positions": "Positions",
    "neurons": "Neurons",
    "kernels": "Kernels",
    "findings": "Findings",
    "compare": "Compare",
    "export": "Export",
}
FRONT = "overview"  # the page that is served at the root, and found under its name too
SINGLE = ("token", "neuron")  # pages of one thing, reached from the page of all


def address(found: state.Shelf) -> str:
    """The name of the run in the address, whether there is one or not; else of the run shown last, or the newest.
    From then on the address has it. A recorded run is found by its name alone, too, where no other has it."""
    name = state.parameter("run") or st.session_state.get("run") or next(iter(found.runs), "")
    if name not in found.runs and state.RECORDED + name in found.runs:
        name = state.RECORDED + name
    if state.parameter("run") != name:
        st.query_params["run"] = name
    st.session_state["run"] = name
    st.session_state["chooser"] = name if name in found.runs else None
    state.tie("run", state.Tie("chooser", None, lambda text: text if text in found.runs else None))
    return name


def to_front() -> None:
    """The front page under its name, as the other pages have theirs: on to the root."""
    state.open_page(FRONT, **st.query_params)


def bar(found: state.Shelf, links: dict[str, Any], name: str) -> None:
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
            on_change=state.keep,
            width=300,
            required=True,
            format_func=lambda name: parts.run_label(name, found),
            label_visibility="collapsed",
            placeholder="Choose a run",
        )
    with st.container(horizontal=True, wrap=False, vertical_alignment="center", gap="small"):
        if name in found.runs:
            parts.facts(found.runs[name])
            parts.definition(found.runs[name])
        if found.broken:
            nothing.unreadable_folders(found)


def main() -> None:
    """Draw the frame around every page, then the page."""
    st.set_page_config(page_title="TwELL workbench", page_icon=ICON, layout="wide", menu_items={"About": theme.ABOUT})
    st.html(theme.CSS + styles.CSS)
    links = {title: st.Page(f"{name}.py", title=title, url_path=name) for name, title in PAGES.items() if name != FRONT}
    links = {PAGES[FRONT]: st.Page(f"{FRONT}.py", title=PAGES[FRONT], url_path="front", default=True)} | links
    single = [st.Page(f"{name}.py", title=name.capitalize(), url_path=name) for name in SINGLE]
    by_name = st.Page(to_front, title=PAGES[FRONT], url_path=FRONT)
    page = st.navigation([*links.values(), *single, by_name], position="hidden")
    found = state.shelf()
    if not found.runs and not found.broken:
        nothing.no_runs(found)
        return
    state.enter(page.url_path)
    name = address(found)
    bar(found, links, name)
    if name not in found.runs:
        nothing.not_found(found, name)
        return
    run = found.runs[name]
    st.session_state["shown"] = run
    parts.status(run)
    try:
        if page.url_path != "kernels":  # timings need no summary, and a live run has a new one every part
            parts.summarise(run)
        with together():  # what several figures of a page are made from is taken once
            page.run()
        ahead.read_ahead(run)
    except (UserError, OSError) as error:
        nothing.unreadable(run, error)


main()
