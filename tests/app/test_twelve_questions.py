"""Twelve questions that a user brings, each answered from the front page in at most three clicks, in a real browser.

On the demo run, with the recorded one beside it: every other question is asked in a window of 800 px in the dark. A
click is one of the mouse, or one text with Enter. Printed with `-s`: how many each answer took, and the seconds from
the first click to the answer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.browser_pages import wait_until

from twell.analysis.shipped import findings_at_hand
from twell.workbench.run.store import Run, open_run

MOST_CLICKS = 3
LOOKS = ((1440, "light"), (800, "dark"))


class Visit:
    """A visitor who begins on the front page with every question, and counts clicks."""

    def __init__(self, watched: Any) -> None:
        self.watched, self.page = watched, watched.page
        self.clicks, self.began = 0, 0.0
        self.took: dict[str, tuple[int, float]] = {}

    def click(self, place: Any) -> None:
        self._begin()
        place.first.click()

    def to(self, page: str) -> None:
        """Click a page's link in the bar."""
        self.click(self.page.locator(".st-key-nav").get_by_role("link", name=page, exact=True))

    def seek(self, text: str) -> None:
        self._begin()
        field = self.page.get_by_placeholder("Token, L3/N42 or words")
        field.fill(text)
        field.press("Enter")

    def sees(self, text: str) -> None:
        """Wait until the page says a text."""
        wait_until(self.page, "text => document.querySelector('.stMain').innerText.includes(text)", arg=text)

    def _begin(self) -> None:
        self.began = self.began or time.monotonic()
        self.clicks += 1

    @contextmanager
    def asks(self, question: str) -> Iterator[None]:
        width, theme = LOOKS[len(self.took) % 2]
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=theme)
        self.watched.open("/?run=demo", ".tw-numbers")
        self.clicks, self.began = 0, 0.0
        yield
        seconds = time.monotonic() - self.began if self.began else 0.0
        self.took[question] = self.clicks, seconds
        print(f"| {question} | {self.clicks} | {seconds:.1f} | {width} |")
        assert self.clicks <= MOST_CLICKS, question


def what_fires(visit: Visit) -> None:
    page = visit.page
    with visit.asks("which tokens fire most"):
        visit.to("Tokens")
        page.wait_for_selector("h1 >> text=/tokens?/i")
        page.wait_for_selector("[data-testid=stDataFrame], .js-plotly-plot")
    with visit.asks("which neurons does this token fire"):
        visit.to("Text")
        visit.click(page.locator(".tw-passage a.t:not(.out)").nth(5))
        row = page.locator(
            ".stMain a[href^='neuron?']"
        ).first  # the model is read first, by a process that has to start
        row.wait_for(timeout=120_000)
    with visit.asks("where does this neuron fire"):
        visit.seek("L7/N220")
        page.wait_for_selector(".tw-example")
        assert page.locator("h1").inner_text().startswith("L7/N220")
    with visit.asks("what does it write"):
        visit.seek("L7/N220")
        page.locator("a.tw-logit").first.wait_for()
    with visit.asks("what is dead and why"):
        visit.to("Neurons")
        visit.click(page.get_by_test_id("stButtonGroup").get_by_text("Never fired"))
        page.wait_for_url("**kind=dead**")


def what_it_buys(visit: Visit, run: Run) -> None:
    with visit.asks("which layer is worth speeding up"):
        visit.to("Kernels")
        visit.sees("Which layer is worth speeding up?")
    with visit.asks("what does sparsity buy here"):
        visit.sees("FFN speedup")
    with visit.asks("does the paper's claim hold"):
        visit.to("Findings")
        hold = int((findings_at_hand(run)["verdict"] == "holds").sum())
        visit.sees(f"{hold} claim{'s' * (hold != 1)} hold{'s' * (hold == 1)}")


def what_else(visit: Visit) -> None:
    page = visit.page
    with visit.asks("what changed between two runs"):
        visit.to("Compare")
        visit.sees("Different: weights")
        visit.sees("Layer by layer")
    with visit.asks("what about my text"):
        visit.to("Text")
        visit.click(page.get_by_role("button", name=re.compile("own text", re.IGNORECASE)))
        page.wait_for_selector("textarea")
    with visit.asks("may I have the figure, the table, the code"):
        visit.click(page.get_by_role("button", name="Data", exact=True))
        page.get_by_role("button", name="Save as CSV").wait_for()
        page.keyboard.press("Escape")
        visit.click(page.get_by_role("button", name="Code", exact=True))
        page.get_by_text("open_run(").first.wait_for()
    with visit.asks("what is nnz"):
        visit.click(page.get_by_role("button", name="What is nnz?"))
        page.locator("dd:visible", has_text="gate pre-activation > 0").first.wait_for()


def test_twelve_questions(browser: Any, watch: Any, demo: Path, demo_address: str) -> None:
    visit = Visit(watch(browser.new_context().new_page(), demo_address))
    what_fires(visit)
    what_it_buys(visit, open_run(demo))
    what_else(visit)
    assert len(visit.took) == 12
    visit.watched.check()
