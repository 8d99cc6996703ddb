"""The dashboard's entry point: the bar with pages and run chooser, then the page.

`twell app RUNS` starts it; `streamlit run app/main.py -- RUNS` does too, with the settings of `.streamlit/config.toml`,
but with Streamlit's own protections only: it answers to every host name, without a content policy (`server/guard.py`).
"""

from __future__ import annotations

import html
from functools import partial
from urllib.parse import unquote, urlsplit

import streamlit as st

from twell.analysis.memo import memo_scope
from twell.app.frame import navigation, tour
from twell.app.server import warm_up
from twell.app.ui import empty_states, run_header, styles, theme, url_state, widgets
from twell.app.ui.pages import FRONT, PAGES
from twell.app.ui.run_cache import shown
from twell.app.ui.run_catalog import RECORDED, RunCatalog, find_runs
from twell.workbench.errors import UserError

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#2f7ed8"/>'
    '<g fill="#fff"><rect x="3" y="3" width="4" height="2"/><rect x="3" y="7" width="2" height="2"/>'
    '<rect x="3" y="11" width="7" height="2"/></g></svg>'
)


def chosen_run(catalog: RunCatalog) -> str:
    """Return the name of the run in the address, whether there is one or not, and write it there if it was missing.

    Without a name in the address it is the run shown last, or the newest. A run of the package is found by its bare
    name too, if no run of the folder has that name.
    """
    name = url_state.parameter("run") or st.session_state.get("run") or next(iter(catalog.runs), "")
    if name not in catalog.runs and RECORDED + name in catalog.runs:
        name = RECORDED + name
    if url_state.parameter("run") != name:
        st.query_params["run"] = name
    st.session_state["run"] = name
    st.session_state["chooser"] = name if name in catalog.runs else None
    url_state.register_param("run", url_state.UrlParam("chooser", None, url_state.one_of(catalog.runs)))
    return name


def to_front() -> None:
    """Send `/overview`, the front page by its name, to the root of the address."""
    url_state.open_page(FRONT, **st.query_params)


def stray_pages() -> list[st.Page]:
    """Return a page that says so for the address, where it names a page that is not there.

    Streamlit would say so in its own words, in a box over the front page. The last such page stays for the Back button.
    """
    name = unquote(urlsplit(st.context.url or "").path.rpartition("/")[2]).strip()
    if name not in ("", *PAGES):
        st.session_state["stray"] = name
    stray = st.session_state.get("stray")
    return [st.Page(partial(empty_states.no_page, stray), title="No such page", url_path=stray)] if stray else []


def main() -> None:
    """Draw the frame around every page, then the page."""
    st.set_page_config(page_title="TwELL workbench", page_icon=ICON, layout="wide", menu_items={"About": theme.ABOUT})
    st.html(theme.CSS + styles.CSS)
    pages = {
        name: st.Page(page.file, title=page.title, url_path="" if name == FRONT else name, default=name == FRONT)
        for name, page in PAGES.items()
    }
    by_name = st.Page(to_front, title=PAGES[FRONT].title, url_path=FRONT)
    strays = stray_pages()
    page = st.navigation([*pages.values(), by_name, *strays], position="hidden")
    st.set_page_config(page_title=f"{page.title} – TwELL workbench")  # tabs and the browser's history tell pages apart
    catalog = find_runs()
    if not catalog.runs and not catalog.broken:
        empty_states.no_runs(catalog)
        return
    url_state.enter_page(page.url_path)
    name = chosen_run(catalog)
    navigation.draw_bar(catalog, pages, name)
    if page in strays:
        page.run()
        return
    if name not in catalog.runs:
        empty_states.not_found(catalog, name)
        return
    try:
        run = shown(catalog.runs[name])
    except UserError as error:
        empty_states.unreadable(catalog.runs[name], error)
        return
    st.session_state["current_run"] = run
    run_header.status(run)
    empty_states.note_bundled(catalog)
    with widgets.show_errors():
        navigation.go_where_sought(run)
    tour.draw_tour(page.url_path in ("", FRONT))
    unmet = st.empty()  # in its place before the page is drawn, which alone knows what the address asks for in vain
    try:
        if page.url_path != "kernels":  # timings need no summary, and a growing run has a new one with every part
            run_header.update_summaries(run)
        with memo_scope():  # tables that several figures of a page need are computed once
            if empty_states.lacks_activity(run, page.url_path):
                empty_states.only_trained(run)
            else:
                page.run()
        if sentences := url_state.unmet():
            with unmet:
                widgets.note(html.escape(" ".join(sentences)))
        warm_up.start(run)
    except (UserError, OSError) as error:
        empty_states.unreadable(run, error)


main()
