"""What a page's elements are drawn with is asked for with the page, and nothing hangs on its being found."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.browser_pages import LIMIT_SECONDS

from twell.app.server import preload
from twell.app.server.preload import Announced, scripts


def head_of(app: Any, path: str = "/tokens") -> list[tuple[bytes, bytes]]:
    """The headers with which an ASGI app begins its answer."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    with ThreadPoolExecutor(1) as pool:  # the browser of other tests has a loop in this thread
        pool.submit(asyncio.run, app({"type": "http", "path": path}, None, send)).result()
    return list(sent[0]["headers"])


def answers(kind: bytes, *headers: tuple[bytes, bytes]) -> Any:
    """An ASGI app whose every answer is of a content type, with these headers."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), *headers]})
        await send({"type": "http.response.body", "body": b""})

    return app


def test_a_page_announces_scripts_and_nothing_else_does() -> None:
    links = dict(head_of(Announced(answers(b"text/html; charset=utf-8"), ["A.1.js", "B.2.js"])))[b"link"].decode()
    assert re.findall(r"<([^>]+)>", links) == ["./static/js/A.1.js", "./static/js/B.2.js"]
    assert links.count('rel="modulepreload"') == 2
    script = answers(b"application/javascript")
    assert head_of(Announced(script, ["A.1.js"])) == head_of(script)
    saved = answers(b"text/html", (b"content-disposition", b'attachment; filename="run.html"'))
    assert head_of(Announced(saved, ["A.1.js"])) == head_of(saved)
    page = answers(b"text/html")
    assert head_of(Announced(page, [])) == head_of(page)
    deeper = "/a/static/js/gone.js"  # Streamlit answers with the page, whose scripts are not there
    assert head_of(Announced(page, ["A.1.js"]), deeper) == head_of(page)


def test_scripts_come_with_what_they_import_once_and_without_what_the_page_names(tmp_path: Path) -> None:
    folder = tmp_path / "static" / "js"
    folder.mkdir(parents=True)
    (tmp_path / "index.html").write_text('<script src="./static/js/base.0.js"></script>')
    files = {
        "Figure.1.js": 'import{a}from"./base.0.js";import"./shared.2.js";import{b as c} from "./gone.3.js";',
        "Table.4.js": 'import{d}from"./shared.2.js";const later=()=>import("./big.5.js");export{d}from"./deep.6.js";',
        "shared.2.js": 'import{e}from"./Figure.1.js";',
    }
    for name in ("base.0.js", "big.5.js", "deep.6.js", "Other.7.js"):
        files[name] = ""
    for name, text in files.items():
        (folder / name).write_text(text)
    names = scripts(tmp_path, ("Figure", "Lacking", "Table"))
    assert names == ["Figure.1.js", "Table.4.js", "shared.2.js", "deep.6.js"]
    assert scripts(tmp_path / "nowhere") == []


def test_every_element_of_the_pages_is_found_in_this_streamlit() -> None:
    names = scripts()
    for element in preload.ELEMENTS:
        assert [name for name in names if name.startswith(f"{element}.")], element


@pytest.mark.parametrize("page", ["tokens", "text"])  # with every element, and without figures: one list for all
def test_scripts_are_asked_for_before_the_page_has_anything_to_show(browser: Any, address: str, page: str) -> None:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.add_init_script(
        """const Plain = window.WebSocket;
        window.WebSocket = class extends Plain {
          constructor(...given) {
            super(...given);
            this.addEventListener('message', () => { window.arrived ??= performance.now(); });
          }
        };"""
    )
    view = context.new_page()
    view.set_default_timeout(1000 * LIMIT_SECONDS)
    view.goto(f"{address}/{page}?run=made")
    view.wait_for_selector("h1.tw-title")
    view.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]')
    view.wait_for_selector(".tw-passage" if page == "text" else ".js-plotly-plot .main-svg")
    loads = view.evaluate("performance.getEntriesByType('resource').map(r => [r.name.split('/').pop(), r.startTime])")
    arrived = view.evaluate("window.arrived")
    loads = [(name, at) for name, at in loads if name.endswith(".js")]
    asked = dict(loads)
    announced = set(scripts())
    assert asked.keys() >= announced
    assert max(asked[name] for name in announced) < arrived
    assert len(loads) == len(asked), "one is fetched twice"
    context.close()


def test_a_server_announces_what_it_serves(address: str) -> None:
    with urllib.request.urlopen(f"{address}/tokens?run=made") as answer:
        links = re.findall(r"<([^>]+)>", answer.headers["link"])
    assert links
    for link in (links[0], links[-1]):
        with urllib.request.urlopen(f"{address}/{link}") as answer:
            assert answer.headers["content-type"].startswith(("text/javascript", "application/javascript"))
            assert "immutable" in answer.headers["cache-control"]
