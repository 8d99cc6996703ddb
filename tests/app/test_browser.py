"""The dashboard in a real browser, served as `twell app` serves it, from an empty folder, every request watched."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from support.browser_pages import wait_until

MAIN = "document.querySelector('[data-testid=stMain]')"
PAGES = {
    "": ".tw-numbers",
    "text": ".tw-passage",
    "tokens": '[data-testid="stDataFrame"]',
    "token": ".tw-places",
    "layers": ".js-plotly-plot",
    "positions": ".js-plotly-plot",
    "neurons": '[data-testid="stDataFrame"]',
    "neuron": ".tw-example",
    "kernels": ".js-plotly-plot",
    "findings": ".tw-claims",
    "compare": ".js-plotly-plot",
    "export": '[data-testid="stDataFrame"]',
}


def test_every_page_opens_without_an_error_or_another_host(
    new_page: Callable[..., Any], address: str, watch: Any
) -> None:
    """One page in two is opened wide and light, the others narrow and dark; then each is shown the other way, and as a
    phone has it."""
    watched = watch(new_page(), address)
    looks = [(1440, "light"), (800, "dark")]
    for number, (path, until) in enumerate(PAGES.items()):
        first, second = looks[number % 2], looks[1 - number % 2]
        for width, theme in (first, second, (390, second[1])):
            watched.page.set_viewport_size({"width": width, "height": 900})
            watched.page.emulate_media(color_scheme=theme)
            if width == first[0]:
                watched.open(f"/{path}?run=made&token=40&neuron=L1/N3", until)
            else:
                watched.page.wait_for_timeout(600)  # what follows the window's width does
            wider = f"/{path} is wider than its window of {width} px, {theme}"
            wait_until(watched.page, f"{MAIN}.scrollWidth <= {width}", message=wider)
    watched.check()


def test_a_narrow_window_has_no_empty_pane_under_the_text(
    new_page: Callable[..., Any], address: str, watch: Any
) -> None:
    """The pane is as tall as what it says; a token's own covers what comes after it while it is pointed at."""
    watched = watch(new_page(800, 900), address)
    watched.open("/text?run=made", ".tw-passage")
    height = "(name) => document.querySelector(name).getBoundingClientRect().height"
    before, passage = (watched.page.evaluate(height, name) for name in (".tw-text", ".tw-passage"))
    assert before - passage < 90, "three lines, not the room for thirty"
    token = watched.page.locator(".tw-passage a.t").nth(3)
    token.hover()
    shown = token.evaluate("(it) => [getComputedStyle(it, '::after').display, getComputedStyle(it, '::after').height]")
    assert shown[0] == "block" and float(shown[1].removesuffix("px")) > 150, "its nnz in every layer"
    assert watched.page.evaluate(height, ".tw-text") == before, "nothing moves"
    watched.check()


def test_panels_keep_their_width_on_a_phone(new_page: Callable[..., Any], address: str, watch: Any) -> None:
    watched = watch(new_page(390, 844), address)
    watched.open("/?run=made", '[class*="st-key-wide-"] .main-svg')
    wait_until(watched.page, "document.querySelector('.js-plotly-plot').offsetWidth > 600")
    scrolls = watched.page.evaluate("document.querySelector('[class*=st-key-wide-]').clientWidth")
    assert scrolls < 390
    watched.check()


BOXES = """([inside, selector]) => [...document.querySelectorAll(`${inside} ${selector}`)].map((part) => {
  const box = part.getBoundingClientRect();
  return [box.left, box.right, box.top, box.bottom];
})"""


def test_a_narrow_window_shows_names_of_colors_and_of_axes(
    new_page: Callable[..., Any], address: str, watch: Any
) -> None:
    watched = watch(new_page(500, 900), address)
    figure = ".st-key-position-0-against-later-positions"
    watched.open("/positions?run=made", f"{figure} .legend .traces")
    names = watched.page.evaluate(BOXES, [figure, ".legend .traces"])
    ((*_, top, _bottom),) = watched.page.evaluate(BOXES, [figure, ".cartesianlayer .xy .gridlayer"])
    assert len(names) > 1 and all(left >= 0 and right <= 500 for left, right, *_ in names), "none beyond the edge"
    assert all(bottom <= top + 8 for *_, bottom in names), "above the dots"
    watched.open("/kernels?run=made", ".st-key-audit .xtitle")
    ((*_, title, _bottom),) = watched.page.evaluate(BOXES, [".st-key-audit", ".xtitle"])
    ticks = watched.page.evaluate(BOXES, [".st-key-audit", ".xtick"])
    assert ticks and all(bottom <= title for *_, bottom in ticks), "the title lies on no name of the axis"
    watched.check()


def test_rows_of_tokens_without_a_text_fit_a_phone(new_page: Callable[..., Any], address: str, watch: Any) -> None:
    watched = watch(new_page(390, 844), address)
    watched.open("/tokens?run=summary&view=tokens", ".tw-fired-rows.bare a.tw-fired")
    boxes = watched.page.evaluate(BOXES, [".tw-fired-rows", ".tw-fired > span"])
    assert len(boxes) > 10 and all(right <= 390 for _, right, *_ in boxes)
    watched.check()


FADED = """(box) => {
  const figure = box.querySelector(".js-plotly-plot").getBoundingClientRect(), edge = box.getBoundingClientRect().right;
  const fade = parseFloat(getComputedStyle(box).maskImage.match(/([\\d.]+)px/)[1]);
  return [figure.right > edge - fade, box.scrollWidth > box.clientWidth];
}"""


def test_a_heat_map_that_goes_on_fades_and_is_whole_at_its_end(
    new_page: Callable[..., Any], address: str, watch: Any
) -> None:
    watched = watch(new_page(390, 844), address)
    watched.open("/neurons?run=made", '[class*="st-key-wide-"] .main-svg')
    wait_until(watched.page, "document.querySelector('.js-plotly-plot').offsetWidth > 600")
    box = watched.page.locator('[class*="st-key-wide-"]').first
    assert box.evaluate(FADED) == [True, True]
    box.evaluate("(box) => box.scrollTo(box.scrollWidth, 0)")
    assert box.evaluate(FADED) == [False, True]
    watched.page.set_viewport_size({"width": 1440, "height": 844})
    wait_until(watched.page, "document.querySelector('[class*=st-key-wide-]').scrollLeft === 0")
    assert box.evaluate("(box) => getComputedStyle(box).maskImage") == "none"
    watched.check()


def test_token_text_does_nothing_in_a_browser(watched: Any, hostile: dict[int, str]) -> None:
    for token in (50, 51, 53, 54):
        assert token in hostile
        watched.open(f"/token?run=made&token={token}", ".tw-places")
    watched.open("/tokens?run=made&view=tokens&least=1&find=script", ".js-plotly-plot .ytick")
    assert "<script>window" in watched.page.locator(".js-plotly-plot .ytick").all_text_contents()[0]
    assert watched.page.evaluate("window.twellHurt") is None
    watched.check()


def test_the_front_page_is_found_under_its_name_too(watched: Any) -> None:
    watched.open("/overview?run=made", ".tw-numbers")
    watched.page.wait_for_url("**/?run=made")
    assert watched.page.get_by_text("Page not found").count() == 0
    watched.check()


@pytest.mark.parametrize(
    ("path", "name"), [("nothing", "nothing"), ("front", "front"), ("a%20<b>page", "a <b>page"), ("a/b/", "b")]
)
def test_an_address_of_no_page_says_so_and_the_bar_leads_on(watched: Any, path: str, name: str) -> None:
    page = watched.page
    watched.open(f"/{path}?run=made", ".tw-empty")
    assert f"no page {name}." in page.locator(".tw-empty").inner_text()
    assert page.get_by_role("dialog").count() == 0, "a box of Streamlit's"
    sent = page.url
    page.locator(".st-key-nav").get_by_role("link", name="Layers", exact=True).click()
    page.wait_for_url("**/layers?run=made")
    page.locator("h1", has_text="layer").wait_for()
    page.go_back()
    page.locator(".tw-empty").wait_for()
    assert page.url == sent
    watched.check()


def test_an_address_below_a_page_leads_to_the_page_that_it_names(watched: Any) -> None:
    """Streamlit sends its page for any address, whose files the browser would seek in the wrong folder."""
    watched.open("/demo/layers?run=made", "h1")
    assert watched.page.url == f"{watched.address}/layers?run=made"
    watched.check()


def test_a_file_that_is_not_there_is_no_page(address: str) -> None:
    """Streamlit answers with its page, whose header would have the browser look for scripts there, and so on."""
    for path, announced in (("layers", True), ("static/js/nothing.js", False)):
        with urllib.request.urlopen(f"{address}/{path}") as answer:
            assert ("link" in answer.headers) == announced
