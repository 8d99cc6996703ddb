"""Share one headless Chromium, and pages of it, among the tests of a process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("TWELL_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--process-per-site",  # which has read the scripts for every page of a context
    # A page of the same process has them compiled: not once more in the background, as they arrive. Chromium takes the
    # last list of features alone, so the rest of it is Playwright's.
    "--disable-features=ScriptStreaming,PaintHolding,AvoidUnnecessaryBeforeUnloadCheckSync,DestroyProfileOnBrowserClose"
    ",HttpsUpgrades,HttpsFirstBalancedModeAutoEnable,LensOverlay,MediaRouter,ThirdPartyStoragePartitioning"
    ",AvoidCorsURLLoaderRestartOnRedirect,OptimizationHints,NetworkTimeServiceQuerying,AimEnabled,PreconnectToSearch",
    "--js-flags=--single-threaded",  # compiling and collecting beside the page takes processors from other tests
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """Yield a headless Chromium for all tests of a process; skip the test where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """Yield the browser, to test what one shows that knows nothing of the dashboard; close what a test has opened."""
    known = list(chromium.contexts)
    yield chromium
    for context in chromium.contexts:
        if context not in known:
            context.close()


@pytest.fixture(scope="session")
def _context(chromium: Any) -> Any:
    """Return a browser's memory of files and scripts, which all tests of a process share: it saves 2 s a page."""
    context = chromium.new_context()
    stays = context.new_page()  # the process that knows the scripts ends with the last page of its site
    stays.route("**/*", lambda route: route.fulfill(body=""))
    stays.goto("http://127.0.0.1/")
    return context


@pytest.fixture
def new_page(_context: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens a page of a width and a height; close its pages when the test ends."""
    opened: list[Any] = []

    def opening(width: int = 1440, height: int = 900) -> Any:
        page = _context.new_page()
        page.set_viewport_size({"width": width, "height": height})
        opened.append(page)
        return page

    yield opening
    for page in opened:
        page.close()
