"""Ways through the pages in a browser: back and forward, from one thing to the next, and by a click into a table."""

from __future__ import annotations

import re
from typing import Any

from support.browser_pages import wait_until

from twell.analysis import examples
from twell.workbench.run.store import Run


def test_the_way_back_and_forward_keeps_every_choice(watched: Any) -> None:
    """An address opens what its sender saw; back and forward go through the choices made."""
    page = watched.page
    watched.open("/neurons?run=made&kind=dead&layer=L2", '[data-testid="stDataFrame"]')
    page.get_by_text("Rarest").click()
    wait_until(page, "location.search.includes('kind=rare')")
    watched.settle()
    assert "layer=L2" in page.url
    sent = page.url
    page.get_by_role("link", name="Export").click()
    page.wait_for_url("**/export?run=made*")
    watched.settle()
    page.go_back()
    page.wait_for_url(sent)
    watched.settle()
    assert page.get_by_label("Layer", exact=True).input_value() == "L2"
    page.go_forward()
    page.wait_for_url("**/export?run=made*")
    watched.check()


def test_from_a_token_to_its_place_to_a_neuron_to_its_examples(watched: Any, made_run: Run) -> None:
    page = watched.page
    page.set_viewport_size({"width": 1440, "height": 260})  # so that a passage is longer than what is seen of it
    watched.open("/token?run=made&token=40", ".tw-places")
    place = page.locator(".tw-place a.where").first
    where = place.inner_text()
    place.click()
    page.wait_for_selector(".tw-passage a.here")
    sequence, position = where.split(":")
    assert f"sequence={sequence}&position={position}" in page.url
    assert "formaldehyde" in page.locator(".tw-passage a.here").inner_text()
    inside = "e => { const b = e.getBoundingClientRect(), p = e.parentElement.getBoundingClientRect(); "
    inside += "return b.top >= p.top && b.bottom <= p.bottom }"
    wait_until(page, f"({inside})(document.querySelector('.tw-passage a.here'))")
    page.get_by_role("link", name="Neurons").click()
    page.wait_for_selector('[data-testid="stDataFrame"]')
    watched.settle()
    page.get_by_label("Go to").fill("L1/N3")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tw-example")
    watched.settle()
    assert "neuron=L1%2FN3" in page.url
    found = examples(made_run, 1, 3)
    assert page.locator(".tw-example").count() == len(found)
    watched.check()


def test_a_click_on_any_cell_opens_the_row(watched: Any) -> None:
    for address, name in (("neurons?kind=strong", "neuron"), ("tokens?view=words&least=5", "word")):
        watched.open(f"/{address}&run=made", '[data-testid="stDataFrame"] canvas')
        watched.settle()
        table = watched.page.locator('[data-testid="stDataFrame"]').last
        shown = table.locator("canvas #glide-cell-1-0").text_content()
        table.locator(".dvn-scroller").click(position={"x": 200, "y": 52})
        watched.page.wait_for_url(f"**{name}=**")
        watched.settle()
        watched.page.locator(
            "h1", has_text=re.compile(f"^{re.escape(str(shown))}")
        ).wait_for()  # drawn after its address
    watched.check()
