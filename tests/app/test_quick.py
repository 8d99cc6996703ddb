"""Choices made before the browser has heard what became of the one before, as over a slow connection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.browser_pages import Watched, wait_until

from twell.workbench.run import manifest as manifests


class Line:
    """The connection of a browser page to the server, on which answers can be held back."""

    def __init__(self, page: Any) -> None:
        self.page, self.held, self.open = page, [], True
        page.route_web_socket("**/_stcore/stream", self._through)

    def _through(self, route: Any) -> None:
        server = route.connect_to_server()
        server.on_message(lambda message: route.send(message) if self.open else self.held.append((route, message)))

    @contextmanager
    def slow(self) -> Iterator[None]:
        """The server hears what is done under it, and answers; the browser hears the answers when it ends."""
        self.open = False
        yield
        self.page.wait_for_timeout(2_000)
        assert self.held
        self.open = True
        while self.held:
            route, message = self.held.pop(0)
            route.send(message)

    def choose(self, role: str, name: str, text: str) -> None:
        """Write a text into a field and choose it, and give the server time to answer."""
        self.page.get_by_role(role, name=name).fill(text)
        self.page.keyboard.press("Enter")
        self.page.wait_for_timeout(500)

    def wait(self, selector: str, text: str) -> None:
        """Wait until the element that a selector matches holds a text."""
        code = "([selector, text]) => document.querySelector(selector)?.innerText.includes(text)"
        wait_until(self.page, code, arg=[selector, text])


DRAWN = """window.drawn = {};  // plotly.js gives the element of each figure functions that tell what happens to it
Object.defineProperty(Element.prototype, "emit", {set(value) {
  Object.defineProperty(this, "emit", {value, writable: true, configurable: true});
  this.on("plotly_beforeplot", () => {
    const name = this.closest("[aria-label]")?.ariaLabel;
    window.drawn[name] = (window.drawn[name] || 0) + 1;
  });
}});"""


def test_a_click_draws_each_figure_once(watched: Any) -> None:
    page = watched.page
    page.add_init_script(DRAWN)
    watched.open("/overview?run=made", ".js-plotly-plot")
    for name, figures in (("Layers", 2), ("Positions", 2)):
        wait_until(page, "() => Object.keys(window.drawn).length > 0")
        page.evaluate("window.drawn = {}")
        page.locator(".st-key-nav").get_by_role("link", name=name, exact=True).click()
        wait_until(page, f"() => Object.keys(window.drawn).length >= {figures}")
        watched.settle()
        page.wait_for_timeout(1_000)  # a second drawing would follow at once
        assert set(page.evaluate("Object.values(window.drawn)")) == {1}, page.evaluate("window.drawn")
        assert page.evaluate("document.querySelector('.st-key-nav').scrollTop") == 0, "headings of the bar are cut"
    watched.check()


def test_a_neuron_and_the_next_sequence(watched: Any) -> None:
    page, line = watched.page, Line(watched.page)
    watched.open("/text?run=made&position=3", ".tw-passage")
    with line.slow():
        line.choose("textbox", "or by one neuron", "L1/N5")
        page.get_by_test_id("stNumberInputStepUp").click()
    line.wait("body", "Sequence 1")
    line.wait(".tw-scale", "L1/N5")
    watched.settle()
    assert page.url.endswith("/text?run=made&neuron=L1%2FN5&sequence=1")
    page.go_back()
    line.wait("body", "Sequence 0")
    assert "position=3" in page.url
    watched.check()


def test_a_search_and_a_look_at_the_data(watched: Any) -> None:
    """What is not in the address itself has the page drawn anew, too."""
    page, line = watched.page, Line(watched.page)
    watched.open("/tokens?run=made&view=tokens", ".js-plotly-plot")
    with line.slow():
        line.choose("textbox", "Search", "right")
        page.locator(".st-key-every-token-data button").click()
    page.wait_for_selector('[data-testid="stPopoverBody"] [data-testid="stDataFrame"]')
    watched.settle()
    assert page.url.endswith("/tokens?run=made&view=tokens&find=right")
    assert page.get_by_role("textbox", name="Search").input_value() == "right"
    watched.check()


def test_another_run_and_its_sequence(watched: Any) -> None:
    page, line = watched.page, Line(watched.page)
    watched.open("/text?run=made", ".tw-passage")
    with line.slow():
        line.choose("combobox", "Run", "oracle")
        page.get_by_test_id("stNumberInputStepUp").click()
    line.wait("body", "Sequence 1")
    watched.settle()
    assert page.url.endswith("/text?run=oracle&sequence=1")
    watched.check()


def test_a_look_at_the_data_changes_nothing_in_the_address(watched: Any) -> None:
    """Nor where it says what is so without it, or says it otherwise than the page would."""
    page, sent = watched.page, "/text?run=made&sequence=0&position=3&neuron=l1/n5"
    watched.open(sent, ".tw-passage a.here")
    page.locator(".st-key-passage-data button").click()
    page.wait_for_selector('[data-testid="stPopoverBody"] [data-testid="stDataFrame"]')
    watched.settle()
    assert page.url.endswith(sent)
    assert page.locator(".tw-passage a.here").count() == 1
    watched.check()


@pytest.mark.parametrize("ends", ["after the choice", "before it"])
def test_a_choice_while_the_run_ends(growing_run: Path, growing_page: Watched, ends: str) -> None:
    """The page asks again and again whether the run has grown, with the address that it knows, and with the name that
    the run had in the list of runs."""
    page, line = growing_page.page, Line(growing_page.page)

    def end() -> None:
        manifest = manifests.read(growing_run / "live")
        manifest.status = manifests.INTERRUPTED
        manifests.write(growing_run / "live", manifest)

    def choose() -> None:
        page.get_by_test_id("stNumberInputStepUp").click()

    growing_page.open("/text?run=live", ".tw-passage")
    with line.slow():
        for act in (choose, end) if ends == "after the choice" else (end, choose):
            act()
            page.wait_for_timeout(1_000)
    page.get_by_text("The capture stopped before its end").wait_for()
    line.wait("body", "Sequence 1")
    growing_page.settle()
    assert page.url.endswith("/text?run=live&sequence=1")
    growing_page.check()
