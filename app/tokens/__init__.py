"""Pages Tokens and Token."""

from __future__ import annotations
