"""A clock for tests, whose time passes only as they say."""

from __future__ import annotations


class Clock:
    """Time that passes only as told."""

    def __init__(self) -> None:
        self.now = 0.0
