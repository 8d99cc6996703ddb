"""What tests of servers share: a port that is free, the dashboard over a folder, and runs that are removed under it."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SERVER_SECONDS = 120  # in which a server has to answer, on a slow machine that does other things


def free_port() -> int:
    """Return a port of this host that nothing listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def remove(folder: Path) -> None:
    """Remove a run under the server, again if that was just writing a summary there."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def served(folder: Path, empty: Path) -> Iterator[str]:
    """Run `twell app` over a folder, started in an empty one; yield the address once it answers."""
    port, deadline = free_port(), time.monotonic() + SERVER_SECONDS
    line = [sys.executable, "-m", "twell.workbench", "app", str(folder), "--port", str(port), "--no-browser"]
    with subprocess.Popen(line, cwd=empty) as process:
        try:
            while True:
                with suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2).close()
                    break
                assert process.poll() is None, "the dashboard ended before it answered"
                assert time.monotonic() < deadline, f"the dashboard did not answer within {SERVER_SECONDS} s"
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
