"""Tell where what can be made again is kept: $XDG_CACHE_HOME, or ~/.cache, in a folder `twell`."""

from __future__ import annotations

import os
from pathlib import Path

from twell.workbench.errors import UserError


def cache_home() -> Path:
    """Return the folder of what can be made again; it may not exist. Raises UserError for a user without a home, as in
    a container that runs under a number."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twell"
    except RuntimeError:
        raise UserError("Expected a home folder to keep a cache in, found none: set XDG_CACHE_HOME.") from None
