"""Twelve questions that a user brings, each answered from any page in at most three clicks, in a real browser.

On the demo run, on a recorded one whose model is not on this machine, and on one that is being recorded. Half of the
questions are asked in a window of 800 px in the dark, the other half on the recorded run. A click is one of the mouse,
or one text with Enter. Printed with `-s`: how many each answer took, and the seconds from first click to the answer.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import TimeoutError
from support.browser_pages import Watched, wait_until
from support.copied_runs import copy_run

from twell.analysis.shipped import findings_at_hand
from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.manifest import RECORDING
from twell.workbench.run.store import Run, open_run

MOST_CLICKS = 3
LOOKS = ((1440, "light"), (800, "dark"))  # of the first six questions, and of the others
ENOUGH = 12_000  # tokens of a run that is being recorded, before the first question
NOT_HERE = "not on this machine"  # what is said where only the model could answer
PART_SECONDS, REST_SECONDS = 2, 15  # of that run: a part, then a rest
LONG = 180_000  # ms: a process with torch starts beside all else
LOST = 10_000  # ms without another address after a click: a visitor clicks again


class Visit:
    """A visitor of a run, who begins on its front page, goes on from wherever an answer stands, and counts clicks."""

    def __init__(self, watched: Any, run: Run, has_model: bool = True, looks: Any = LOOKS) -> None:
        self.watched, self.page = watched, watched.page
        self.run, self.has_model, self.looks = run, has_model, looks
        self.page.set_default_timeout(LONG)
        self.clicks, self.began = 0, 0.0
        self.took: dict[str, tuple[int, float]] = {}

    def click(self, place: Any) -> None:
        self._begin()
        place.first.click()

    def to(self, page: str) -> None:
        """Click a page's link in the bar."""
        self.follow(self.page.locator(".st-key-nav").get_by_role("link", name=page, exact=True))

    def follow(self, link: Any) -> None:
        """Click a link to another page, and again if that went to a page that was being drawn anew.

        Then wait for its heading: the address changes at once, while what the last page had still stands there.
        """
        link.first.hover()  # as it is pointed at, the link to the front page gets a path
        path, heading = link.first.evaluate("link => link.pathname"), self.page.locator(".stMain h1").all_inner_texts()
        moves = urlsplit(self.page.url).path != path
        self.click(link)
        try:
            self.page.wait_for_url(lambda url: urlsplit(url).path == path, timeout=LOST)
        except TimeoutError:
            self.click(link)
        if moves:
            changed = "old => (now => now && now.innerText !== old)(document.querySelector('.stMain h1'))"
            wait_until(self.page, changed, *heading[:1])

    def seek(self, text: str) -> None:
        self._begin()
        field = self.page.get_by_placeholder("Token, L3/N42 or words")
        field.fill(text)
        field.press("Enter")

    def sees(self, text: str) -> None:
        """Wait until the page says a text."""
        wait_until(self.page, "text => document.querySelector('.stMain').innerText.includes(text)", text)

    def _begin(self) -> None:
        self.began = self.began or time.monotonic()
        self.clicks += 1

    @contextmanager
    def asks(self, question: str, on_front_page: bool = False) -> Iterator[None]:
        """Count the clicks of an answer, from the front page or from where the last one was found."""
        width, theme = self.looks[len(self.took) // 6]
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=theme)
        if not self.took:
            self.watched.open(f"/?run={self.run.path.name}", ".tw-numbers")
        elif on_front_page:
            self.to("Overview")
            self.page.wait_for_selector(".tw-numbers")
            self.watched.settle()
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
        row.wait_for(timeout=LONG)
    label = often_shown(visit.run)
    with visit.asks("where does this neuron fire"):
        visit.seek(label)
        page.wait_for_selector(".tw-example")
        assert page.locator("h1").inner_text().startswith(label)
    with visit.asks("what does it write", on_front_page=True):
        visit.seek(label)
        if visit.has_model:
            page.locator("a.tw-logit").first.wait_for()
        else:
            visit.sees(NOT_HERE)
    with visit.asks("what is dead and why"):
        visit.to("Neurons")
        visit.sees("as long as those of neurons that fire" if visit.has_model else NOT_HERE)
        lead = page.locator(".tw-lead", has_text="are dead").bounding_box()
        assert lead["y"] + lead["height"] < 900, "on the first view"
    visit.page.get_by_test_id("stButtonGroup").get_by_text("Dead", exact=True).click()
    page.wait_for_url("**kind=dead**")


def often_shown(run: Run) -> str:
    """Return the name of the neuron of the last layer with the largest value among a run's examples."""
    while True:
        with suppress(UserError):  # a part that the next one replaces
            rows = open_run(run.path).frame("examples", ["layer", "neuron", "value"])
            break
    last = rows[rows["layer"] == run.layers - 1]
    return f"L{run.layers - 1}/N{last.loc[last['value'].idxmax(), 'neuron']}"


def what_it_buys(visit: Visit) -> None:
    with visit.asks("which layer is worth speeding up"):
        visit.to("Kernels")
        visit.sees("has most to gain")
    with visit.asks("what does sparsity buy here", on_front_page=True):
        visit.sees("FFN speedup")
        visit.sees("has most to gain")  # which the longest bar has not
    with visit.asks("does the paper's claim hold"):
        visit.to("Findings")
        visit.sees("The paper's claim as a whole, that a little L1 in training")
        if visit.run.manifest.status == RECORDING:  # whose verdicts may change with every part
            visit.sees("claims hold")
            return
        hold = int((findings_at_hand(visit.run)["verdict"] == "holds").sum())
        visit.sees(f"{hold} claim{'s' * (hold != 1)} hold{'s' * (hold == 1)}")


def what_else(visit: Visit) -> None:
    page = visit.page
    with visit.asks("what changed between two runs"):
        visit.to("Compare")
        visit.sees("Different: ")
        row = page.locator(".tw-changes > div").nth(3).bounding_box()
        assert row["y"] + row["height"] < 900, "what changed most is on the first view"
        visit.sees("Layer by layer")
    with visit.asks("what about my text", on_front_page=visit.has_model):
        if visit.has_model:
            visit.follow(page.get_by_role("link", name="Try your own text"))
            page.wait_for_selector("textarea")
        else:
            visit.to("Text")
            visit.click(page.get_by_role("button", name=re.compile("own text", re.IGNORECASE)))
            page.get_by_text(NOT_HERE).first.wait_for()
    page.keyboard.press("Escape")
    page.get_by_test_id("stDialog").wait_for(state="detached")
    with visit.asks("may I have the figure, the table, the code", on_front_page=True):
        visit.click(page.get_by_role("button", name="Data", exact=True))
        page.get_by_role("button", name="Save as CSV").wait_for()
        page.keyboard.press("Escape")
        visit.click(page.get_by_role("button", name="Code", exact=True))
        page.get_by_text("open_run(").first.wait_for()
    with visit.asks("what is nnz"):
        visit.click(page.get_by_role("button", name="What is nnz?"))
        page.locator("dd:visible", has_text="gate pre-activation > 0").first.wait_for()


def ask_all(visit: Visit) -> None:
    what_fires(visit)
    what_it_buys(visit)
    what_else(visit)
    assert len(visit.took) == 12
    visit.watched.check()


@pytest.fixture
def runs(demo: Path, growing: tuple[Path, str]) -> Path:
    """Return the folder of a server that shows the demo run, the same for all tests."""
    copy_run(demo, growing[0] / "demo")
    return growing[0]


@pytest.mark.timeout(900)
def test_on_the_demo(growing_page: Watched, runs: Path) -> None:
    ask_all(Visit(growing_page, open_run(runs / "demo")))


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("runs")
def test_on_a_recorded_run(growing_page: Watched) -> None:
    """Whose model is not here: what its weights alone would tell is said to be missing."""
    recorded = open_run(Path(str(resources.files("twell.data"))) / "recorded" / "h200-8x2048-text")
    ask_all(Visit(growing_page, recorded, has_model=False, looks=LOOKS[::-1]))


CAPTURE = f"""
from twell.workbench.cli import main
from twell.workbench.run import writer
writer.PART_SECONDS = {PART_SECONDS}
main()
"""


@contextmanager
def recording(runs: Path, aside: Path) -> Iterator[Run]:
    """Capture the bundled model on more text than is read in minutes; yield the run once it has ENOUGH tokens.

    runs: the folder of the run; aside: where the text and what is printed go
    """
    passages = resources.files("twell.data").joinpath("passages.jsonl").read_text(encoding="utf-8")
    (text := aside / "text.jsonl").write_text(passages * 200, encoding="utf-8")
    line = [sys.executable, "-c", CAPTURE, "capture", "builtin:demo", "--text", str(text)]
    line += ["--out", str(runs / "live"), "--examples", "4", "--probes", "all", "--batch-tokens", "1024"]
    with (aside / "said.txt").open("wb") as log:
        capture = subprocess.Popen(line, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        while capture.poll() is None:
            with suppress(UserError):
                run = open_run(runs / "live")
                if run.manifest.tokens >= ENOUGH:
                    break
            time.sleep(0.2)
        assert capture.poll() is None, (aside / "said.txt").read_text()
        with resting(capture, run.path):
            yield run
        ended = open_run(run.path).manifest
        assert ended.status == RECORDING, "it was being recorded until the last answer"
        assert len(ended.parts) > len(run.manifest.parts), "and grew while it was asked"
    finally:
        capture.terminate()
        capture.wait(60)


@contextmanager
def resting(capture: subprocess.Popen[bytes], run: Path) -> Iterator[None]:
    """Stop a capture for REST_SECONDS after each part: it goes on for long and leaves the processor to others."""
    over = threading.Event()

    def turns() -> None:
        known = manifests.read(run).tokens
        while not over.wait(0.1):
            if (tokens := manifests.read(run).tokens) != known:
                known = tokens
                capture.send_signal(signal.SIGSTOP)
                over.wait(REST_SECONDS)
                capture.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=turns)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.timeout(1200)
def test_on_a_run_that_is_being_recorded(growing_page: Watched, runs: Path, tmp_path: Path) -> None:
    with recording(runs, tmp_path) as run:
        ask_all(Visit(growing_page, run))
