"""Follow links between pages without loading Streamlit's front end anew: 0.3 s a click instead of 1.5 s.

Links that stand in HTML of our own (`st.html`) are plain ones, so a browser loads the whole front end for each. A
script of a few lines, served beside Streamlit's own and named in its index.html, takes a plain click on one, puts its
address into the browser's history, and has Streamlit draw that address as it does for the Back button. Clicks with a
key held, links to other servers and links within a page stay the browser's. Without the script links work, but slower.

The same click may close a popover or end what was typed in a field, of which Streamlit's front end tells the server
from a timer, so after it has asked for the page that the link leads to: as the last word, with the page that was left,
which is then drawn again. The script has the click count once all that was told.

Streamlit's links open no other tab: it is not told of clicks with a key held, and its link to the front page, whose
address has no path and so means the page at hand, gets one as it is pointed at. Its links to the page at hand, with
other parameters, are followed as ours are: it would draw what they name and keep the address of what was there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twell.app.server import bar, base, pictures

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME = "twell-links.js"
SCRIPT = """const plain = (event) =>
  !(event.defaultPrevented || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey);
addEventListener("click", (event) => {
  const clicked = event.target.closest && event.target.closest("a[href], button");
  if (!clicked || !clicked.click || clicked.target || !event.isTrusted) return;
  if (!plain(event)) {
    if (clicked.closest("[data-testid=stPageLink]")) event.stopImmediatePropagation();
    return;
  }
  const popover = document.querySelector("[data-testid=stPopoverButton][aria-expanded=true]");
  const closes = popover && clicked !== popover && !clicked.closest("[data-st-overlay-root]");
  if (!closes && !clicked.matches("a")) return;
  event.preventDefault();
  event.stopImmediatePropagation();
  if (closes) popover.click();
  setTimeout(() => clicked.click());  // after the timer of what was closed or typed, as that was set before
}, true);
addEventListener("click", (event) => {
  const link = event.target.closest && event.target.closest(".stHtml a[href], [data-testid=stPageLink] a[href]");
  if (!link || link.target || !plain(event)) return;
  const address = new URL(link.href);
  if (address.origin !== location.origin || address.hash) return;
  if (!link.closest(".stHtml")) {
    const front = location.pathname.endsWith("/");
    if (address.pathname !== location.pathname || (!front && link.getAttribute("href").startsWith("?"))) return;
    event.stopImmediatePropagation();
  }
  event.preventDefault();
  history.pushState(null, "", address);
  dispatchEvent(new PopStateEvent("popstate"));
  const page = document.querySelector(".stMain");
  if (page && !link.closest(".tw-passage")) page.scrollTo(0, 0);
}, true);
for (const kind of ["pointerover", "focusin"]) addEventListener(kind, (event) => {
  const link = event.target.closest && event.target.closest("[data-testid=stPageLink] a[href^='?']");
  if (link) link.setAttribute("href", "./" + link.getAttribute("href"));
});
"""
DEFERRED = {NAME: SCRIPT, pictures.NAME: pictures.SCRIPT, bar.NAME: bar.SCRIPT}
SCRIPTS = {
    name: f"{{{text}}}" for name, text in {base.NAME: base.SCRIPT, **DEFERRED}.items()
}  # names in a block are its own
_TAGS = "".join(f'<script src="./{name}"{" defer" * (name in DEFERRED)}></script>' for name in SCRIPTS).encode()


class Linked:
    """ASGI middleware: serve this script and those of the other modules, and name all in each page."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request for a script; answer others as the app does, with the scripts named in a page."""
        script = SCRIPTS.get(scope["path"].rpartition("/")[2]) if scope["type"] == "http" else None
        if script is not None:
            headers = [(b"content-type", b"text/javascript; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": script.encode()})
        elif base.wants_page(scope):
            plain = [pair for pair in scope["headers"] if pair[0].lower() != b"accept-encoding"]
            await self.app({**scope, "headers": plain}, receive, _ScriptInjector(send))
        else:
            await self.app(scope, receive, send)


class _ScriptInjector:
    """Passes an answer on, with the scripts named in it if it is a whole page of HTML."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.start: Message | None = None  # of a page, until its body is whole
        self.body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if message["status"] != 200 or not _is_html(message):
                await self.send(message)
            else:
                self.start = message
            return
        if self.start is None or message["type"] != "http.response.body":
            await self.send(message)
            return
        self.body += message.get("body", b"")
        if message.get("more_body"):
            return
        body = self.body.replace(b"</head>", _TAGS + b"</head>", 1)
        headers = [pair for pair in self.start["headers"] if pair[0].lower() != b"content-length"]
        headers.append((b"content-length", str(len(body)).encode()))
        await self.send({**self.start, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})


def _is_html(message: Message) -> bool:
    headers = {name.lower(): value for name, value in message["headers"]}
    return headers.get(b"content-type", b"").startswith(b"text/html") and b"content-encoding" not in headers
