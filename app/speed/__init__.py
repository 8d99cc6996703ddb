"""Page Kernels."""

from __future__ import annotations
