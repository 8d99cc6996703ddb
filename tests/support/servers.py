"""What tests of servers share: a port that is free, and runs that are removed under a server."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path


def free_port() -> int:
    """Return a port of this host that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def remove(folder: Path) -> None:
    """Remove a run under the server, again if that was just writing a summary there."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
