"""Random clicks of a visitor in a real browser: links, buttons, choices, half-typed fields, Back, in quick succession.

A case opens a page of a run and does STEPS things there. After each, the page has to be whole: drawn to its end, with
one heading, without a traceback or an error of the browser; a link has led where it says, and the page shows the
sequence that the address names. Half of the cases look at a run that is being recorded, which ends on the way. Number
and seed decide what is done where a page offers the same; how far the page has come by then is a matter of time, so
a failure may need its number run again a few times.

    PYTHONPATH=tests python -m support.fuzz clicks --cases 20
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import Error, sync_playwright
from support import synthetic_runs
from support.browser_pages import Watched
from support.browsers import ARGUMENTS, CHROMIUM
from support.fuzz import FAILED, SAME, Outcome, generator
from support.servers import served

from twell.analysis import ensure
from twell.workbench.run import manifest as manifests

STEPS = 25
PAUSES = (0, 0, 50, 150, 400)  # milliseconds after an action
PAGES = ("", "text", "tokens", "layers", "positions", "neurons", "kernels", "findings", "compare", "export")
TEXTS = ("the", "ing", "L1/N3", "L0/N12", "12:3", "3", "0", "-1", "1e9", "zzzz", " ", "ü")
BODY = ".stMain, [data-testid=stPopoverBody]"
SETTLED = '[data-testid="stApp"][data-test-script-state="notRunning"]'
PATIENCE = 2_500  # milliseconds for an element that may be gone or covered by now


class Visitor:
    """Someone who clicks about: what was done so far, and what is wrong with the page, if anything is."""

    def __init__(self, watched: Watched, random: np.random.Generator, ends: Callable[[], None] | None) -> None:
        self.watched, self.page, self.random, self.ends = watched, watched.page, random, ends
        self.done: list[str] = []
        self.target: str | None = None  # the path that the last link leads to

    def act(self) -> None:
        """Do one thing that the page offers, and note it."""
        actions = {
            self.follow_bar: 4, self.follow: 5, self.press: 6, self.choose: 2, self.write: 2, self.switch: 1,
            self.step: 2, self.escape: 1, self.go_back: 2, self.end_run: 1 if self.ends else 0,
        }  # fmt: skip
        shares = np.array(list(actions.values())) / sum(actions.values())
        action = list(actions)[self.random.choice(len(shares), p=shares)]
        self.target = None
        try:
            action()
        except Error as error:  # what was to be clicked is gone: others are drawn by now
            self.done.append(f"  not done: {str(error).splitlines()[0][:80]}")
        self.page.wait_for_timeout(int(self.random.choice(PAUSES)))

    def one_of(self, selector: str, say: Callable[[Any], str]) -> Any:
        """Choose one of the elements in sight that a selector matches, and note it; Error if there is none."""
        seen = [element for element in self.page.locator(selector).element_handles() if element.is_visible()]
        if not seen:
            raise Error(f"no {selector}")
        element = seen[self.random.integers(len(seen))]
        self.done.append(say(element))
        element.scroll_into_view_if_needed(timeout=PATIENCE)
        return element

    def _follow(self, selector: str) -> None:
        link = self.one_of(selector, lambda link: f"link {link.get_attribute('href')}")
        link.hover(timeout=PATIENCE)
        self.target = link.evaluate("a => a.target || a.origin !== location.origin || a.hash ? null : a.pathname")
        link.click(timeout=PATIENCE)

    def follow_bar(self) -> None:
        self._follow(".st-key-nav a")

    def follow(self) -> None:
        self._follow(".stMain .stHtml a[href], [data-testid=stPopoverBody] a[href]")

    def press(self) -> None:
        buttons = f":is({BODY}) button:not(.st-key-measure-start *)"  # which works for minutes
        self.one_of(buttons, lambda button: f"button {button.inner_text()!r}").click(timeout=PATIENCE)

    def choose(self) -> None:
        boxes = f":is({BODY}, .st-key-bar) [data-testid=stSelectbox] input"
        self.one_of(boxes, lambda box: f"box {box.get_attribute('aria-label')}").click(timeout=PATIENCE)
        self.page.wait_for_timeout(200)
        self.one_of("[role=option]", lambda option: f"option {option.inner_text()!r}").click(timeout=PATIENCE)

    def write(self) -> None:
        text = str(self.random.choice(TEXTS))
        field = self.one_of(
            f":is({BODY}, .st-key-bar) input:is([type=text], [type=number]):not([role=combobox])",
            lambda field: f"{text!r} into {field.get_attribute('aria-label')}",
        )
        field.fill(text, timeout=PATIENCE)
        if self.random.random() < 0.6:
            self.page.keyboard.press("Enter")

    def switch(self) -> None:
        self.one_of(
            f":is({BODY}) :is([data-testid=stCheckbox] label, [role=radio])", lambda one: f"switch {one.inner_text()!r}"
        ).click(timeout=PATIENCE)

    def step(self) -> None:
        self.one_of("[data-testid=stNumberInputStepUp]", lambda _: "next sequence").click(timeout=PATIENCE)

    def escape(self) -> None:
        self.done.append("Escape")
        self.page.keyboard.press("Escape")

    def go_back(self) -> None:
        if self.page.evaluate("navigation.canGoBack"):  # to a page of the dashboard
            self.done.append("Back")
            self.page.go_back()

    def end_run(self) -> None:
        self.done.append("the run ends")
        assert self.ends
        self.ends()

    def fault(self) -> str:
        """Wait until the page has been drawn; return what is wrong with it, "" if nothing is."""
        try:
            for _ in range(2):  # a choice may have it drawn once more
                self.page.wait_for_selector(SETTLED)
                self.page.wait_for_timeout(250)
        except Error:
            return "it is not drawn to its end"
        for trace in self.page.locator("[data-testid=stException]").all_inner_texts():
            return trace
        if self.watched.errors:
            return f"errors of the browser: {self.watched.errors}"
        path, sequence = self.page.evaluate(
            "() => [location.pathname, new URLSearchParams(location.search).get('sequence') || '0']"
        )
        if self.target not in (None, path) and (self.target, path) != ("/overview", "/"):
            return f"the link leads to {self.target}, and the page is {path}"
        if (headings := self.page.locator(".stMain h1").count()) != 1:
            return f"{headings} headings"
        shown = self.page.get_by_role("spinbutton", name="Sequence")
        if path == "/text" and shown.count() and shown.input_value() != sequence:
            return f"sequence {shown.input_value()}, and the address says {sequence}"
        return ""


def cases(folder: Path, seed: int) -> Callable[[int], list[Outcome]]:
    """Make two runs; return the function that runs a case by its number."""
    os.environ |= {name: str(folder / "home") for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME")}  # the server's own, too
    ensure(synthetic_runs.make(folder / "made", layers=5, d_ff=512, sequences=80, length=96, fired=True))

    def case(number: int) -> list[Outcome]:
        random = generator(seed, number)
        grows = bool(random.random() < 0.5)
        live = folder / f"case-{number}" / "live" if grows else None
        if live:
            synthetic_runs.make(live, layers=3, sequences=20, status="recording")
        ends = (lambda: manifests.update(live, status=manifests.INTERRUPTED)) if live else None
        empty = folder / f"empty-{number}"
        empty.mkdir()
        begins = f"/{random.choice(PAGES)}?run={'live' if live else 'made'}"
        with served(live.parent if live else folder, empty) as address, sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            watched = Watched(browser.new_page(viewport={"width": 1440, "height": 900}), address)
            watched.open(begins, "h1")
            visitor = Visitor(watched, random, ends)
            for _ in range(STEPS):
                visitor.act()
                if fault := visitor.fault():
                    done = "; ".join(visitor.done)
                    return [Outcome(FAILED, f"{begins}: {done}", f"{fault}\n{watched.page.url}")]
            browser.close()
        return [Outcome(SAME, begins)]

    return case
