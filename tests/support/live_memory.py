"""Show that a page beside a capture takes no more memory: `python tests/support/live_memory.py [MINUTES [TEXT]]`.

The bundled model captures TEXT (default its passages, which end within the first minute) for MINUTES, default 15, with
examples, while its page Kernels stands open in a real browser. Every EVERY seconds: resident memory of the server, of
the capture and of the page's script in MiB, points and lines of the page's figure, and whether they are those of the
run's table at that moment. Needs playwright and chromium, TWELL_CHROMIUM if it lies elsewhere.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from playwright.sync_api import Page, sync_playwright

from twell.analysis.figures.speed.live import sparse_calls
from twell.app.ui.run_cache import LiveRun
from twell.workbench.run.part_files import LIVE
from twell.workbench.run.store import open_run

EVERY, PATIENCE = 30.0, 15.0  # seconds between two lines, and until the page has to show a table
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-precise-memory-info"]
FIGURE = """() => {
    const plot = document.querySelector('.js-plotly-plot');
    return plot && plot._fullData ? plot._fullData.map(line => [Array.from(line.x), Array.from(line.y)]) : [];
}"""


def resident(process: subprocess.Popen[bytes]) -> float:
    """Return the resident memory of a process and of its children, in MiB."""
    pages, waiting = 0, [process.pid]
    while waiting:
        pid = waiting.pop()
        with suppress(OSError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def lines_of(table: pd.DataFrame) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return x and y of each line that the page is to draw: a layer's milliseconds, then its nnz."""
    layers = [here for _, here in table.groupby("layer")]
    return [(here["seconds"].to_numpy(), here[column].to_numpy()) for here in layers for column in ("ms", "nnz_mean")]


def equal(lines: list[Any], expected: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Return whether the page's lines are those of a table, to a float's last bits."""
    return len(lines) == len(expected) > 0 and all(
        len(line[axis]) == len(wanted[axis]) and np.allclose(line[axis], wanted[axis], rtol=1e-12, atol=0)
        for line, wanted in zip(lines, expected, strict=True)
        for axis in (0, 1)
    )


def compared(page: Page, folder: Path) -> tuple[list[Any], float]:
    """Return the page's lines, and after how many seconds they were a table's; NaN if they were none's.

    Every table of the time is looked at, since either may be ahead when both are read.
    """
    began, tables = time.monotonic(), list[list[tuple[np.ndarray, np.ndarray]]]()
    lines: list[Any] = []
    while time.monotonic() - began < PATIENCE:
        with suppress(Exception):  # a part that is being put in its place
            run = open_run(folder)
            tables.append(lines_of(sparse_calls(LiveRun(run.path, run.manifest))))
        lines = page.evaluate(FIGURE)
        if any(equal(lines, table) for table in tables):
            return lines, time.monotonic() - began
        page.wait_for_timeout(250)
    return lines, float("nan")


def first_figure(page: Page, folder: Path) -> float:
    """Return the seconds from the first rows of timings on disk to a figure on the page."""
    while not (folder / LIVE).exists():
        time.sleep(0.02)
    written = time.time()
    while not page.evaluate(FIGURE):
        page.wait_for_timeout(50)
    return time.time() - written


def serve(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Start the dashboard, and return its process once it answers."""
    line = [sys.executable, "-m", "twell.workbench", "app", str(folder), "--port", str(port), "--no-browser"]
    server = subprocess.Popen(line, cwd=folder, stdout=subprocess.DEVNULL)
    while server.poll() is None:
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=2).close()
            return server
        time.sleep(0.1)
    raise RuntimeError("the dashboard ended before it answered")


def main(minutes: float, text: str, folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    run = folder / "live"
    options = ["--text", text, "--out", str(run), "--examples", "8"]
    server = serve(folder, port)
    capture = subprocess.Popen(
        [sys.executable, "-m", "twell.workbench", "capture", "builtin:demo", *options], stdout=subprocess.DEVNULL
    )
    try:
        with sync_playwright() as driver:
            executable = os.environ.get("TWELL_CHROMIUM") or shutil.which("chromium")
            page = driver.chromium.launch(executable_path=executable, args=ARGUMENTS).new_page()
            page.goto(f"http://127.0.0.1:{port}/kernels?run=live")
            print(f"first figure {first_figure(page, run):.1f} s after the first rows on disk", flush=True)
            began = time.monotonic()
            while time.monotonic() - began < 60 * minutes and capture.poll() is None:
                page.wait_for_timeout(EVERY * 1000)
                lines, after = compared(page, run)
                heap = page.evaluate("performance.memory.usedJSHeapSize") / 2**20
                print(
                    f"{time.monotonic() - began:5.0f} s: server {resident(server):6.0f}, capture "
                    f"{resident(capture):6.0f}, page {heap:5.0f} MiB; {open_run(run).manifest.tokens:>10,} tokens; "
                    f"{len(lines)} lines of {len(lines[0][0]) if lines else 0} points, the table's after {after:.1f} s",
                    flush=True,
                )
    finally:
        capture.send_signal(signal.SIGINT)
        capture.wait()
        server.terminate()
        server.wait()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(float([*sys.argv[1:2], "15"][0]), [*sys.argv[2:3], "builtin:passages"][0], Path(place))
