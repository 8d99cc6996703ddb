"""Answer requests that name this server, and no others; tell browsers what a page may load.

A page of another site can have its own name resolve to 127.0.0.1. A browser then takes the dashboard for a part of
that site, and lets its scripts read runs and start measurements (DNS rebinding). Such a request still carries the
site's name in its Host header, so the server refuses every request whose Host is not a name of the address it listens
on. A websocket, which browsers open to any host, must come from a page of this server as well.

The names are those of this machine (`localhost`, 127.0.0.1, [::1], always), the host the server was started with, and,
where that is reached from other machines, the machine's name. A server on all addresses (0.0.0.0, ::) answers to every
address written in numbers too: no site can have one as its name. Ports of Host are not compared, as a tunnel changes
them.

Behind a proxy, the proxy must pass Host on as the browser sent it, and --host be the name in the browser's address.
Cost: a few microseconds a request.
"""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from twell.app.server.preload import STATIC

if TYPE_CHECKING:
    from collections.abc import Iterable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_INLINE_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def host_names(host: str) -> frozenset[str]:
    """Return the names that a server started at `host` answers to, without ports and brackets."""
    host = _normalized(host)
    if host in LOOPBACK or (_is_address(host) and ip_address(host).is_loopback):
        return LOOPBACK | {host}
    machine = _normalized(socket.gethostname())
    return LOOPBACK | {host, machine, machine.partition(".")[0], f"{machine.partition('.')[0]}.local"} - {""}


def content_policy(static: Path = STATIC) -> str:
    """Return the Content-Security-Policy under which the pages work.

    Everything comes from this server. Streamlit styles elements in the page itself, its tables draw images from data:
    and blob: addresses, and the one script that its index.html holds is allowed by its hash.

    Args:
        static: Streamlit's folder of files for the browser.
    """
    page = static / "index.html"
    inline = _INLINE_SCRIPT.findall(page.read_text(encoding="utf-8")) if page.is_file() else []
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline]
    policy = {
        "default-src": "'self'",
        "script-src": " ".join(["'self'", *(f"'sha256-{value}'" for value in hashes)]),
        "style-src": "'self' 'unsafe-inline'",
        "img-src": "'self' data: blob:",
        "font-src": "'self' data:",
        "media-src": "'self' data: blob:",
        "worker-src": "'self' blob:",
        "object-src": "'none'",
        "base-uri": "'self'",
        "form-action": "'self'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {sources}" for name, sources in policy.items())


class Guard:
    """ASGI middleware: refuse requests to other hosts with 403, and send the headers that bind browsers."""

    def __init__(self, app: ASGIApp, host: str, policy: str) -> None:
        """Guard `app`, served at the address `host`, whose pages load what the Content-Security-Policy allows."""
        self.app = app
        self.names, self.any_address = host_names(host), host in ("", "0.0.0.0", "::")
        self.headers = [
            (b"x-frame-options", b"DENY"),
            (b"x-content-type-options", b"nosniff"),
            (b"content-security-policy", policy.encode()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, with the headers; or refuse."""

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                replaced = {name for name, _ in self.headers}
                headers = [pair for pair in message.get("headers", []) if pair[0].lower() not in replaced]
                message = {**message, "headers": [*headers, *self.headers]}
            await send(message)

        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
        elif reason := self._refusal(scope):
            await _refuse(scope, send_guarded, reason)
        else:
            await self.app(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> str:
        """Return a sentence on why a request is refused; "" for one that is to be answered."""
        hosts = _header(scope, b"host")
        if len(hosts) != 1 or not self._is_own(_host_of(hosts[0])):
            sent = " and ".join(hosts) or "none"
            return (
                f"Expected a request to {', '.join(sorted(self.names))}, got the host {sent[:100]!r}: open the address "
                "that `twell app` printed, or start it with --host and the name in the browser's address."
            )
        origins = _header(scope, b"origin") if scope["type"] == "websocket" else []
        if any(_address_of(origin) != _address_of(f"{_scheme(origin)}://{hosts[0]}") for origin in origins):
            return (
                f"Expected a websocket from a page of {hosts[0][:100]}, got one from {origins[0][:100]!r}: open the "
                "address that `twell app` printed."
            )
        return ""

    def _is_own(self, name: str) -> bool:
        return name in self.names or (self.any_address and _is_address(name))


async def _refuse(scope: Scope, send: Send, reason: str) -> None:
    """Send 403 and the reason. A websocket's server without answers of its own sends 403 alone."""
    kind = "http"
    if scope["type"] == "websocket":
        if "websocket.http.response" not in scope.get("extensions", {}):
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        kind = "websocket.http"
    body = f"{reason}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode())]
    await send({"type": f"{kind}.response.start", "status": 403, "headers": headers})
    await send({"type": f"{kind}.response.body", "body": body})


def _header(scope: Scope, name: bytes) -> list[str]:
    pairs: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return [value.decode("latin-1") for key, value in pairs if key.lower() == name]


def _host_of(header: str) -> str:
    """Return the name in a Host header, without its port; "" for one that is not of the form NAME[:PORT]."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/@?#\s]+)(:\d{1,5})?", header)
    return _normalized(match[1]) if match else ""


def _scheme(origin: str) -> str:
    return origin.partition("://")[0]


def _address_of(origin: str) -> tuple[str, int] | None:
    """Return the host and port of an origin; None for one that has none, such as "null"."""
    try:
        url = urlsplit(origin)
        port = url.port or {"http": 80, "https": 443}[url.scheme]
    except (KeyError, ValueError):
        return None
    return (_normalized(url.hostname), port) if url.hostname else None


def _normalized(name: str) -> str:
    return name.lower().strip("[]").removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
