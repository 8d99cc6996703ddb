"""However the server is told to end, it ends in order: what it left for its end is done, and no traceback is shown."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest
from support.servers import SERVER_SECONDS, free_port

from twell.app.server.launch import command
from twell.workbench.options import AppOptions

SERVE = """
import atexit, os, signal, sys
from twell.app.server.serve import main
atexit.register(print, "temporary folders are removed")
atexit.register(os.kill, os.getpid(), signal.SIGTERM)  # a Ctrl-C reaches the launcher too, which then sends this
main(*sys.argv[1:])
"""


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_the_server_ends_in_order(told: signal.Signals, tmp_path: Path) -> None:
    port, deadline = free_port(), time.monotonic() + SERVER_SECONDS
    line = command(AppOptions(runs=tmp_path, port=port))
    arguments = line[line.index("twell.app.server.serve") + 1 :]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVE, *arguments], cwd=tmp_path, **pipes) as process:
        try:
            while True:
                assert process.poll() is None and time.monotonic() < deadline, "it did not answer"
                with suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2).close()
                    break
                time.sleep(0.1)
            process.send_signal(told)
            said = process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert "temporary folders are removed" in said and "Traceback" not in said
    assert process.returncode == 0
