"""Announce to the browser, with each page, the scripts that draw the page's elements.

Streamlit's front end loads the code of an element when the first element of its kind arrives: thirty files or more,
plotly.js among them, while the server is busy with the rest of the page. Here the response with the page names them in
a `Link` header, so that they are fetched and compiled before they are needed. The names are read from the files of the
installed Streamlit. A file that is not found there is not announced, and is loaded when it is needed. Cost: 20 ms at
the start; a browser that has the files does not ask for them again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import streamlit

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

STATIC = Path(streamlit.__file__).parent / "static"
# The elements that nearly every page has, by the name of their script, largest first. Announcing fields and tables too
# would slow down the pages without them, because the browser would compile that code first.
ELEMENTS = ("PlotlyChart", "Html", "PageLink", "Selectbox")
_IMPORTED = re.compile(r'\b(?:from|import)\s*"\./([^"/]+\.js)"')
_HEAD_LENGTH = 2**15  # characters at the beginning of a script, where its imports are


def scripts(static: Path = STATIC, elements: Iterable[str] = ELEMENTS) -> list[str]:
    """Return the names of the scripts that draw the elements and, in turn, of those that they import.

    Args:
        static: Streamlit's folder of files for the browser.
        elements: the names that the elements' scripts begin with.

    Returns:
        File names, without those that Streamlit's own page loads already.
    """
    folder, page = static / "static" / "js", static / "index.html"
    page_html = page.read_text(encoding="utf-8") if page.is_file() else ""
    names: dict[str, None] = {}  # a dict keeps the order
    queue = [file.name for name in elements for file in sorted(folder.glob(f"{name}.*.js"))]
    for name in queue:  # grows within the loop
        if name not in names and name not in page_html and (folder / name).is_file():
            names[name] = None
            with (folder / name).open(encoding="utf-8") as file:
                queue += _IMPORTED.findall(file.read(_HEAD_LENGTH))
    return list(names)


class Announced:
    """ASGI middleware: add a header to each page with which the browser loads the scripts after the page's own."""

    def __init__(self, app: ASGIApp, scripts: Iterable[str]) -> None:
        self.app = app
        links = ", ".join(f'<./static/js/{name}>; rel="modulepreload"; fetchpriority="low"' for name in scripts)
        self.header = [(b"link", links.encode())] if links else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, with the header if the answer is a page."""

        async def announce(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_page(message):
                message = {**message, "headers": [*message["headers"], *self.header]}
            await send(message)

        # A file that is not there, which lies deeper than a page, is answered with the page, too. A browser told of it
        # would look there for the scripts, and so on, without end.
        may_be_page = scope["type"] == "http" and scope["path"].count("/") == 1
        await self.app(scope, receive, announce if may_be_page else send)


def _is_page(message: Message) -> bool:
    """Return whether a response is HTML to show. From a file to save a browser would load the scripts too, but beside
    it, where they are not."""
    headers = dict(message["headers"])
    return headers.get(b"content-type", b"").startswith(b"text/html") and b"content-disposition" not in headers
