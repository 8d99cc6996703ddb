"""What the browser draws a page's elements with, announced with the page itself.

Streamlit's front end asks for the code of an element when the first one of its kind arrives: thirty files or more,
plotly.js among them, while the server is busy with the rest of the page. Here the answer that carries the page names
them in a `Link` header, so that they are fetched and compiled before they are needed. The names are read off the files
of the installed Streamlit. What is not found there is not announced, and is loaded when it is needed, as without this.
Costs 20 ms at the start; a browser that has the files asks for none of them again.
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
# What every page has, by the file that Streamlit's front end draws it with, the largest first; three pages alone lack a
# figure. To announce fields and tables as well makes pages later that have none, as their code is compiled first.
ELEMENTS = ("PlotlyChart", "Html", "PageLink", "Selectbox")
_IMPORTED = re.compile(r'\b(?:from|import)\s*"\./([^"/]+\.js)"')
_HEAD = 2**15  # characters of a file, which begins with what it imports


def scripts(static: Path = STATIC, elements: Iterable[str] = ELEMENTS) -> list[str]:
    """The scripts of Streamlit's static folder that draw the elements, and those that they import, but for what its
    page names itself."""
    folder, page = static / "static" / "js", static / "index.html"
    named = page.read_text(encoding="utf-8") if page.is_file() else ""
    needed: dict[str, None] = {}
    waiting = [file.name for name in elements for file in sorted(folder.glob(f"{name}.*.js"))]
    for name in waiting:  # which grows meanwhile
        if name not in needed and name not in named and (folder / name).is_file():
            needed[name] = None
            with (folder / name).open(encoding="utf-8") as file:
                waiting += _IMPORTED.findall(file.read(_HEAD))
    return list(needed)


class Announced:
    """ASGI middleware: a page's answer names the scripts as modules to be loaded after what the page itself names."""

    def __init__(self, app: ASGIApp, scripts: Iterable[str]) -> None:
        self.app = app
        links = ", ".join(f'<./static/js/{name}>; rel="modulepreload"; fetchpriority="low"' for name in scripts)
        self.header = [(b"link", links.encode())] if links else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, with the header where the answer is a page."""

        async def announce(message: Message) -> None:
            if message["type"] == "http.response.start" and _is_page(message):
                message = {**message, "headers": [*message["headers"], *self.header]}
            await send(message)

        await self.app(scope, receive, announce if scope["type"] == "http" else send)


def _is_page(message: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/html") for name, value in message["headers"])
