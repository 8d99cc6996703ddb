"""The bar: all links are in sight where they have room; on a narrower page the open page's is. Cost: 15 s."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image
from support.browser_pages import wait_until

IN_SIGHT = """(name) => {
  const bar = document.querySelector(".st-key-nav"), fade = 26;
  const link = [...bar.querySelectorAll("a")].find((one) => one.textContent.trim() === name);
  if (!link) return false;
  const there = link.getBoundingClientRect(), frame = bar.getBoundingClientRect();
  return there.left >= frame.left - 1 && there.right <= frame.right - fade + 1;
}"""

OUT_OF_SIGHT = """() => {
  const bar = document.querySelector(".st-key-nav").getBoundingClientRect();
  const cut = [...document.querySelectorAll(".st-key-nav a")].filter((link) => {
    const box = link.getBoundingClientRect();
    return box.left < Math.max(bar.left, 0) || box.right > bar.right;
  });
  return cut.map((link) => link.textContent.trim());
}"""


@pytest.mark.parametrize("width", [720, 800, 1251, 1280])
def test_all_pages_are_in_sight(watched: Any, width: int) -> None:
    watched.page.set_viewport_size({"width": width, "height": 900})
    for page in ("kernels", "export"):
        watched.open(f"/{page}?run=made", "h1")
        watched.page.locator(".st-key-nav a", has_text="Export").wait_for()
        watched.page.wait_for_timeout(300)  # in which the bar is scrolled
        assert watched.page.evaluate(OUT_OF_SIGHT) == []
    fields = [watched.page.locator(f".st-key-bar {one}").bounding_box() for one in (".stForm", ".st-key-chooser")]
    assert fields[0]["y"] == pytest.approx(fields[1]["y"], abs=3) and (fields[0]["y"] < 30) == (width > 1250)
    watched.check()


def test_links_that_are_scrolled_out_fade(watched: Any) -> None:
    """Not cut with a straight edge, as if there were no more: those that go out at the left too."""
    watched.page.set_viewport_size({"width": 600, "height": 844})
    watched.open("/export?run=made", "h1")
    wait_until(watched.page, IN_SIGHT, "Export")
    bar = watched.page.locator(".st-key-nav")
    assert bar.evaluate("(bar) => bar.scrollLeft") > 0
    assert bar.evaluate("(bar) => getComputedStyle(bar).maskImage.match(/rgba\\(0, 0, 0, 0\\)/g).length") == 2


@pytest.mark.parametrize(("page", "name"), [("kernels", "Kernels"), ("export", "Export"), ("", "Overview")])
def test_the_link_of_the_open_page_is_scrolled_into_sight(watched: Any, page: str, name: str) -> None:
    watched.page.set_viewport_size({"width": 390, "height": 844})
    watched.open(f"/{page}?run=made", "h1")
    wait_until(watched.page, IN_SIGHT, name)
    watched.check()


def test_it_is_so_of_a_page_that_a_link_of_the_page_opens_and_the_bar_then_stays_where_it_is_scrolled(
    watched: Any,
) -> None:
    watched.page.set_viewport_size({"width": 390, "height": 844})
    watched.open("/?run=made", "h1")
    watched.page.locator('.tw-mini[href^="kernels"]').click()
    watched.page.wait_for_url("**/kernels?run=made")
    wait_until(watched.page, IN_SIGHT, "Kernels")
    watched.settle()
    watched.page.evaluate("document.querySelector('.st-key-nav').scrollLeft = 0")
    watched.page.get_by_role("button", name="Data", exact=True).first.click()
    watched.page.get_by_test_id("stPopoverBody").wait_for()
    watched.settle()
    assert watched.page.evaluate("document.querySelector('.st-key-nav').scrollLeft") == 0
    watched.check()


def test_nothing_of_streamlit_lies_on_the_run_chooser_while_a_page_runs(watched: Any) -> None:
    watched.open("/export?run=made", "h1")
    added = """() => {
      const status = document.createElement("div");
      status.dataset.testid = "stStatusWidget";
      document.querySelector("[data-testid=stHeader]").append(status);
      return getComputedStyle(status).display;
    }"""
    assert watched.page.evaluate(added) == "none", "its Stop, which comes once a page has run for a while"
    watched.check()


HINT_WIDTHS = """(field) => {
  const look = getComputedStyle(field), hint = getComputedStyle(field, "::placeholder");
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `${hint.fontSize} ${hint.fontFamily}`;
  const room = field.clientWidth - parseFloat(look.paddingLeft) - parseFloat(look.paddingRight);
  return [pen.measureText(field.placeholder).width, room];
}"""


@pytest.mark.parametrize("width", [320, 390, 768])
def test_the_hint_of_the_search_is_read_whole_beside_the_run(watched: Any, width: int) -> None:
    watched.page.set_viewport_size({"width": width, "height": 844})
    watched.open("/export?run=made", ".st-key-search input")
    wide, room = watched.page.locator(".st-key-search input").evaluate(HINT_WIDTHS)
    assert 100 < wide <= room
    fields = [watched.page.locator(f".st-key-bar {one}").bounding_box() for one in (".stForm", ".st-key-chooser")]
    assert fields[0]["y"] == pytest.approx(fields[1]["y"], abs=3), "in one row: the bar stays in sight, and is low"
    assert fields[1]["x"] + fields[1]["width"] <= width
    name = watched.page.locator(".st-key-chooser input")
    assert name.evaluate("(field) => getComputedStyle(field).textOverflow") == "ellipsis", "where it has no room"
    watched.check()


def test_a_link_shows_that_the_keyboard_is_on_it(watched: Any) -> None:
    """More than by the grey ground that the open page's link has too; and Enter opens it."""
    watched.open("/export?run=made", "h1")
    link = watched.page.locator(".st-key-nav a", has_text="Layers")
    outline = "(link) => [getComputedStyle(link).outlineStyle, getComputedStyle(link).outlineWidth]"
    assert link.evaluate(outline)[0] == "none"
    watched.page.keyboard.press("Tab")  # from here on the focus is the keyboard's
    link.focus()
    assert link.evaluate(outline) == ["solid", "2px"]
    watched.page.keyboard.press("Enter")
    watched.page.wait_for_url("**/layers?run=made")
    watched.check()


def test_its_line_goes_on_to_the_edges_of_a_wide_window(watched: Any) -> None:
    watched.page.set_viewport_size({"width": 1920, "height": 900})
    watched.open("/export?run=made", "h1")
    for left in (2, 960, 1900):
        strip = watched.page.screenshot(clip={"x": left, "y": 44, "width": 1, "height": 16})
        assert len(Image.open(io.BytesIO(strip)).convert("RGB").getcolors() or []) > 1, f"a line at {left} px"
    assert watched.page.evaluate("document.querySelector('.stMain').scrollWidth") <= 1920


def test_the_buttons_of_the_tour_stand_in_one_row(watched: Any) -> None:
    watched.page.set_viewport_size({"width": 1280, "height": 900})
    watched.open("/?run=made", ".st-key-tour-next")
    tops = [watched.page.locator(f".st-key-tour-{name}").bounding_box()["y"] for name in ("next", "leave")]
    assert tops[0] == tops[1]
