"""A click on a link leads where it says, whatever it closes or ends on the page."""

from __future__ import annotations

from typing import Any

import pytest

LINKS = {"of the bar": ".st-key-nav a:not([href*='overview'])", "of our own": ".stMain .stHtml a[href*='run=made']"}
# fields by what they ask for; what was typed into the first two counts as it is left, into the last with Enter alone
TYPED = {"/tokens": "part of a", "/neurons": "L3/N42", "/positions": "Token, L3/N42 or words"}


def follow(watched: Any, link: str) -> None:
    """Click the last such link to another page, and expect that page to be drawn, and to stay."""
    page, heading = watched.page, watched.page.locator("h1").inner_text()
    path = page.locator(link).last.evaluate("link => link.pathname")
    page.locator(link).last.click()
    page.wait_for_url(f"**{path}?run=made**")
    page.wait_for_timeout(1000)  # in which the page that was left could come back
    watched.settle()
    assert f"{path}?run=made" in page.url
    assert page.locator("h1").inner_text() != heading
    watched.check()


@pytest.mark.parametrize("link", LINKS.values(), ids=list(LINKS))
@pytest.mark.parametrize("button", ["Data", "Code"])
def test_an_open_popover_does_not_hold_the_page(watched: Any, button: str, link: str) -> None:
    watched.open("/?run=made", ".tw-numbers")
    watched.page.get_by_role("button", name=button, exact=True).first.click()
    watched.page.get_by_test_id("stPopoverBody").wait_for()
    watched.settle()
    follow(watched, link)
    assert watched.page.get_by_test_id("stPopoverBody").count() == 0


@pytest.mark.parametrize("start", TYPED)
def test_what_was_typed_does_not_hold_the_page(watched: Any, start: str) -> None:
    watched.open(f"{start}?run=made", "h1")
    watched.page.get_by_placeholder(TYPED[start]).last.fill("L1/N3")
    follow(watched, LINKS["of the bar"])


@pytest.mark.parametrize(("link", "to"), [("The dead neurons", "&kind=dead"), ("Neurons", "")])
def test_a_search_that_a_link_to_its_own_page_ends(watched: Any, link: str, to: str) -> None:
    watched.open("/neurons?run=made", "h1")
    watched.page.get_by_placeholder("Token, L3/N42 or words").fill("L1/N3")
    watched.page.get_by_role("link", name=link, exact=True).click()
    watched.page.wait_for_url(f"**/neurons?run=made{to}")
    watched.page.wait_for_timeout(1000)
    watched.settle()
    assert watched.page.url.endswith(f"/neurons?run=made{to}")
    watched.check()


def test_links_to_the_page_at_hand_change_its_address(watched: Any) -> None:
    """So Back, a reload and a copied address show the neuron that is there."""
    page = watched.page
    watched.open("/neuron?run=made&neuron=L1%2FN3", "h1")
    for neuron in (4, 5):
        page.get_by_role("link", name=f"L1/N{neuron}", exact=True).click()
        page.wait_for_url(f"**/neuron?run=made&neuron=L1%2FN{neuron}")
        page.locator("h1", has_text=f"L1/N{neuron}").wait_for()
    page.go_back()
    page.locator("h1", has_text="L1/N4").wait_for()
    assert page.url.endswith("neuron=L1%2FN4") and page.title() == "Neuron – TwELL workbench"
    page.reload()
    page.locator("h1", has_text="L1/N4").wait_for()
    watched.check()


@pytest.mark.parametrize("how", [{"modifiers": ["Control"]}, {"button": "middle"}], ids=["key", "button"])
@pytest.mark.parametrize(("name", "path"), [("Overview", "/"), ("Text", "/text")])
def test_a_link_of_the_bar_opens_another_tab(watched: Any, how: dict[str, Any], name: str, path: str) -> None:
    watched.open("/layers?run=made", "h1")
    with watched.page.context.expect_page() as opened:
        watched.page.locator(".st-key-nav").get_by_role("link", name=name, exact=True).click(**how)
    opened.value.wait_for_url(f"**{path}?run=made", wait_until="commit")
    opened.value.close()
    assert "/layers?run=made" in watched.page.url


def test_a_button_counts_beside_an_open_popover(watched: Any) -> None:
    watched.open("/layers?run=made", "h1")
    watched.page.get_by_role("button", name="Data", exact=True).first.click()
    watched.page.get_by_test_id("stPopoverBody").wait_for()
    watched.settle()
    watched.page.get_by_role("button", name="Code", exact=True).first.click()
    watched.page.get_by_text("open_run(").first.wait_for()
    assert watched.page.get_by_test_id("stPopoverBody").count() == 1
    watched.check()


@pytest.mark.parametrize("width", [390, 1000, 1440])
def test_no_link_of_the_bar_lies_over_another(watched: Any, width: int) -> None:
    watched.page.set_viewport_size({"width": width, "height": 700})
    watched.open("/findings?run=made", "h1")
    boxes = [link.bounding_box() for link in watched.page.locator(".st-key-nav a").all()]
    ends = [box["x"] + box["width"] for box in boxes]
    assert all(end <= box["x"] + 1 for end, box in zip(ends[:-1], boxes[1:], strict=True))
