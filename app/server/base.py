"""Pages lie in one folder: Streamlit's front end is told which, and an address below it is led to the page it names.

Otherwise the front end looks below the page first (`/text/_stcore/health`), is told twice that nothing is there, which
the browser's console shows as errors, and then looks where it was all the time. A page names its files relative to
itself, so the folder is right behind a proxy that serves the dashboard below a path, too. The script is not deferred:
the front end reads what it says as it starts.

For `/a/b` Streamlit sends the page all the same, whose files a browser then seeks in `/a/`, and gets the page again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

NAME = "twell-base.js"
SCRIPT = 'window.__streamlit = {BACKEND_BASE_URL: new URL(".", location).href};'
FOLDERS = ("_stcore", "app", "component", "media", "static")  # of Streamlit's files, which are no pages


class InOneFolder:
    """ASGI middleware: send a browser that asks for a page below the folder of pages to the page of that name."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, or with the address of the page."""
        folder, *below = scope.get("path", "").strip("/").split("/")
        if not below or folder in FOLDERS or not wants_page(scope):
            await self.app(scope, receive, send)
            return
        page = "../" * (scope["path"].count("/") - 1) + quote(below[-1])
        query = b"?" * bool(scope["query_string"]) + scope["query_string"]
        await send({"type": "http.response.start", "status": 307, "headers": [(b"location", page.encode() + query)]})
        await send({"type": "http.response.body", "body": b""})


def wants_page(scope: Scope) -> bool:
    """Return whether a request is a browser's for a page, not for a page's files or data."""
    accepted = [value for name, value in scope.get("headers", []) if name.lower() == b"accept"]
    return scope["type"] == "http" and any(b"text/html" in value for value in accepted)
