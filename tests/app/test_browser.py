"""The dashboard in a real browser, served as `twell app` serves it, from an empty folder, every request watched."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from twell.analysis import contexts
from twell.workbench.store import Run
from twell.workbench.writer import RunWriter

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = os.environ.get("TWELL_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PAGES = {
    "": ".tw-numbers",
    "tokens": '[data-testid="stDataFrame"]',
    "token": ".tw-places",
    "layers": ".js-plotly-plot",
    "positions": ".js-plotly-plot",
    "kernels": ".js-plotly-plot",
}

# Whether the last figure shows so many batches.
DRAWN = "many => [...document.querySelectorAll('.js-plotly-plot')].at(-1)?._fullData?.[0]?._length === many"

pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="no chromium on this machine")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], str]]:
    """Start `twell app` over a folder, in an empty folder; gives the address once it answers."""
    running: list[subprocess.Popen[bytes]] = []

    def start(folder: Path) -> str:
        port = free_port()
        line = [sys.executable, "-m", "twell.workbench", "app", str(folder), "--port", str(port), "--no-browser"]
        running.append(subprocess.Popen(line, cwd=tmp_path_factory.mktemp("empty")))
        address = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{address}/_stcore/health", timeout=2).close()
                return address
            except OSError:
                assert running[-1].poll() is None, "the dashboard ended before it answered"
                time.sleep(0.1)
        raise AssertionError("the dashboard did not answer within 30 s")

    yield start
    for process in running:
        process.terminate()
        process.wait(10)


class Watched:
    """A browser page, and what must not happen in it: errors, and requests to any other host."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address, self.errors, self.hosts = page, address, [], set()
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._said)
        page.on("request", lambda request: self._host(request.url))
        page.on("websocket", lambda opened: self._host(opened.url))

    def _said(self, message: Any) -> None:
        # Streamlit looks for its own base path under the page's path first, and finds it one level up.
        probe = "/_stcore/" in message.location.get("url", "") and "404" in message.text
        if message.type == "error" and not probe:
            self.errors.append(f"{message.text} {message.location}")

    def _host(self, url: str) -> None:
        if not url.startswith(("data:", "blob:")):
            self.hosts.add(url.split("/")[2])

    def open(self, path: str, until: str) -> None:
        self.page.goto(self.address + path)
        self.page.wait_for_selector(until, timeout=30_000)
        self.settle()

    def settle(self) -> None:
        self.page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]', timeout=30_000)

    def check(self) -> None:
        assert self.errors == []
        assert self.hosts == {self.address.removeprefix("http://")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def address(serve: Callable[[Path], str], runs: Path) -> str:
    return serve(runs)


@pytest.fixture
def watched(browser: Any, address: str) -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    yield Watched(context.new_page(), address)
    context.close()


@pytest.mark.parametrize(("width", "theme"), [(1440, "light"), (800, "dark")])
def test_every_page_opens_without_an_error_or_another_host(browser: Any, address: str, width: int, theme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    watched = Watched(context.new_page(), address)
    for path, until in PAGES.items():
        watched.open(f"/{path}?run=made&token=40", until)
        wide = watched.page.evaluate("document.querySelector('[data-testid=stMain]').scrollWidth")
        assert wide <= width, f"/{path} is {wide} px wide in a window of {width}"
    watched.check()
    context.close()


def test_from_a_token_to_its_places_and_back(watched: Watched, made_run: Run) -> None:
    page = watched.page
    watched.open("/tokens?run=made&find=formal", '[data-testid="stDataFrame"] canvas')
    page.locator(".js-plotly-plot .scatterlayer .point").first.click(force=True)
    page.wait_for_selector(".tw-places")
    watched.settle()
    assert "token=40" in page.url
    assert page.locator("h1").inner_text().startswith("␣formaldehyde")
    first = contexts(made_run, 40).iloc[0]
    place = page.locator(".tw-place:not(.names)").first
    assert place.locator(".where").inner_text() == f"{first['sequence']}:{first['position']}"
    page.get_by_text("Quietest first").click()
    page.wait_for_function("location.search.includes('order=quietest')")
    link = page.url
    page.get_by_role("link", name="← All tokens").click()
    page.wait_for_selector('[data-testid="stDataFrame"]')
    watched.settle()
    assert "find=formal" in page.url
    page.go_back()
    page.wait_for_selector(".tw-places")
    assert page.url == link
    watched.check()


def test_token_text_does_nothing_in_a_browser(watched: Watched, hostile: dict[int, str]) -> None:
    for token in (50, 51, 53, 54):
        assert token in hostile
        watched.open(f"/token?run=made&token={token}", ".tw-places")
    watched.open("/tokens?run=made&least=1&find=script", ".js-plotly-plot .ytick")
    assert "<script>window" in watched.page.locator(".js-plotly-plot .ytick").all_text_contents()[0]
    assert watched.page.evaluate("window.twellHurt") is None
    watched.check()


def test_a_new_part_is_on_the_open_page_within_two_seconds(
    browser: Any, serve: Callable[[Path], str], made: ModuleType, tmp_path: Path
) -> None:
    """The quickest of three parts counts: a busy machine may hold one up, and not the page."""
    shape = made.Shape(layers=3, sequences=40, timings=1)
    rng = np.random.default_rng(5)
    columns, times = made.draw(shape), made.timings(shape, made.draw(shape), rng)
    writer = RunWriter(tmp_path / "live", made.manifest(shape))
    writer.add("vocab", made.vocabulary(shape.vocab))

    def part(number: int) -> None:
        rows = columns["sequence"] // 10 == number
        writer.add("timings", {**times, "batch": [number] * len(times["batch"])})
        made.add_part(writer, shape, {name: values[rows] for name, values in columns.items()}, rng)

    part(0)
    watched = Watched(browser.new_page(), serve(tmp_path))
    watched.open("/kernels?run=live", ".tw-mark.live")
    took = []
    for number in (1, 2, 3):
        watched.page.wait_for_function(DRAWN, arg=number, timeout=20_000)
        began = time.monotonic()
        part(number)
        watched.page.wait_for_function(DRAWN, arg=number + 1, timeout=20_000)
        took.append(time.monotonic() - began)
    writer.finish()
    assert min(took) < 2.0, took
    watched.page.wait_for_selector(".tw-mark", state="detached", timeout=20_000)
    watched.check()
