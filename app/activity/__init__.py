"""Pages Overview, Layers and Positions."""

from __future__ import annotations
