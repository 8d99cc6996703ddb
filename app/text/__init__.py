"""Page Text."""

from __future__ import annotations
