"""Start the dashboard: `twell app RUNS`, or `launch(AppOptions(runs=Path("runs")))` from Python.

Streamlit runs in a process of its own, with address, theme and "no usage statistics" as settings, so that they hold in
whatever folder it is started. Costs one Python start; Ctrl-C, or the end of this process, stops it.
"""

from __future__ import annotations

import errno
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import webbrowser
from importlib.util import find_spec
from pathlib import Path

from twell.app.ui.run_cache import WITHOUT_DAMAGED
from twell.app.ui.theme import SETTINGS
from twell.workbench.errors import UserError, not_installed
from twell.workbench.options import AppOptions

DEFAULT_RUNS = Path("runs")  # may be missing: the package has recorded runs of its own


def launch(options: AppOptions) -> None:
    """Serve the dashboard over a folder of runs until it is stopped.

    Raises UserError if `options.runs` names a folder that does not exist, or if the address cannot be listened on.
    """
    if not options.runs.is_dir() and options.runs != DEFAULT_RUNS:
        raise UserError(
            f"Expected a folder of runs at {options.runs}, found none: record one with `twell capture`, or "
            "`twell demo` for the bundled model."
        )
    check_address(options.host, options.port)
    process = subprocess.Popen(command(options))
    threading.Thread(target=_announce, args=(process, options), daemon=True).start()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code > 0:
        raise UserError(
            f"Expected the dashboard to run until it is stopped, it ended with exit code {code}: see above."
        )


def command(options: AppOptions) -> list[str]:
    """Return the command line that serves the dashboard.

    With `-P`, a file in the current folder, such as `click.py`, is not imported in place of the library of that name.
    """
    address = {"server.address": options.host, "server.port": options.port, "browser.serverAddress": options.host}
    return [
        sys.executable,
        "-P",
        "-m",
        "twell.app.server.serve",
        str(options.runs.resolve()),
        json.dumps(SETTINGS | address),
        *([WITHOUT_DAMAGED] if options.without_damaged else []),
    ]


def url(host: str, port: int) -> str:
    """Return the address of a page, as a browser reads it: an IPv6 address in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def check_address(host: str, port: int) -> None:
    """Raise UserError if no server could listen at this address, or if there is no server."""
    if find_spec("streamlit") is None:
        raise UserError(not_installed("streamlit"))
    if not 1 <= port <= 65535:
        raise UserError(f"Expected a port from 1 to 65535, got {port}: choose another with --port.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"Expected port {port} to be free, something listens there already: choose another with --port, or "
                f"open {url(host, port)} if it is the dashboard."
            ) from None
        raise UserError(
            f"Expected an address of this machine, got {host} port {port} ({error.strerror or error}): "
            "choose others with --host and --port."
        ) from None


def _announce(process: subprocess.Popen[bytes], options: AppOptions) -> None:
    """Print the address, and open a browser, once the server answers there."""
    for _ in range(200):
        if process.poll() is not None:
            return
        try:
            socket.create_connection((options.host, options.port), timeout=1).close()
            break
        except OSError:
            time.sleep(0.1)
    address = url(options.host, options.port)
    print(f"Dashboard: {address}  (Ctrl-C stops it)", flush=True)
    if options.browser:
        webbrowser.open(address)
