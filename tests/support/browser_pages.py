"""Watch a page of the dashboard, and wait for it; its content policy lets nothing on it evaluate text.

Playwright's `wait_for_function` evaluates in the page, which the policy refuses; `evaluate` comes from the debugger.
"""

from __future__ import annotations

import time
from typing import Any

POLL_SECONDS = 0.1
LIMIT_SECONDS = 60.0  # until what does not come is missed, on a slow machine that does other things


def wait_until(page: Any, expression: str, arg: Any = None, message: str = "") -> None:
    """Wait until a JavaScript expression, or a function of `arg`, is true in the page.

    AssertionError with a message after LIMIT_SECONDS.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    while not page.evaluate(expression, arg):
        assert time.monotonic() < deadline, message or f"not true within {LIMIT_SECONDS:g} s: {expression}"
        page.wait_for_timeout(1000 * POLL_SECONDS)


class Watched:
    """A browser page that notes its errors and the hosts that it asks, of which only the dashboard's is allowed."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address, self.errors, self.hosts = page, address, [], set()
        page.set_default_timeout(1000 * LIMIT_SECONDS)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._said)
        page.on("request", lambda request: self._host(request.url))
        page.on("websocket", lambda opened: self._host(opened.url))

    def _said(self, message: Any) -> None:
        if message.type == "error":
            self.errors.append(f"{message.text} {message.location}")

    def _host(self, url: str) -> None:
        if not url.startswith(("data:", "blob:")):
            self.hosts.add(url.split("/")[2])

    def open(self, path: str, until: str) -> None:
        """Go to a path; wait until a selector matches and the page has been drawn."""
        self.page.goto(self.address + path)
        self.page.wait_for_selector(until)
        self.settle()

    def settle(self) -> None:
        """Wait until Streamlit has run the page to its end, and has the code that draws each of its elements."""
        self.page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]')
        self.page.wait_for_selector('[data-testid="stSkeleton"]', state="detached")

    def check(self) -> None:
        """Expect no error, and no request to another host."""
        assert self.errors == []
        assert self.hosts == {self.address.removeprefix("http://")}
