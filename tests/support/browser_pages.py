"""Wait for a page of the dashboard, whose content policy lets nothing on it evaluate text.

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
