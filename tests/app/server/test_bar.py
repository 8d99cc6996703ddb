"""The bar on a page that is narrower than its links: the open page's stands in sight. Cost: 5 s."""

from __future__ import annotations

from typing import Any

import pytest
from support.browser_pages import wait_until

IN_SIGHT = """(name) => {
  const bar = document.querySelector(".st-key-nav"), fade = 26;
  const link = [...bar.querySelectorAll("a")].find((one) => one.textContent.trim() === name);
  if (!link) return false;
  const there = link.getBoundingClientRect(), frame = bar.getBoundingClientRect();
  return there.left >= frame.left - 1 && there.right <= frame.right - fade + 1;
}"""


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
