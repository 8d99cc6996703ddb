"""Tables write numbers as the text around them does: what a browser draws into their canvas."""

from __future__ import annotations

import re

from support.browser_pages import Watched, wait_until

from twell.app.ui.formatting import SPACE, column_form, typeset_form

# Cells are drawn, so no element has their text as it is shown.
NOTE_DRAWN = """
window.drawn = [];
const own = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, ...where) {
  window.drawn.push(text);
  return own.call(this, text, ...where);
};
"""


def drawn(watched: Watched, address: str, awaited: str) -> list[str]:
    """Open a page; return every text that its tables drew once one of them is `awaited`, a regular expression."""
    watched.page.add_init_script(NOTE_DRAWN)
    watched.open(address, '[data-testid="stDataFrame"]')
    watched.page.locator('[data-testid="stDataFrame"]').last.scroll_into_view_if_needed()
    wait_until(watched.page, "form => window.drawn.some(text => new RegExp(form).test(text))", awaited)
    return list(watched.page.evaluate("window.drawn"))


def test_thousands_in_a_long_table(watched: Watched) -> None:
    texts = drawn(watched, "/neurons?run=made&kind=hot", f"^[1-9]{SPACE}\\d{{3}}$")
    assert not [text for text in texts if re.search(r"\d{4}|\d,\d", text)]
    watched.check()


def test_signs_and_spaces_in_a_short_table(watched: Watched) -> None:
    texts = drawn(watched, "/findings?run=made", f"^−\\d\\.\\d\\d{SPACE}%$")
    assert not [text for text in texts if re.search(r"^-\d|\d%|\d,\d", text)]
    assert any(re.fullmatch(rf"\d{SPACE}\d{{3}}{SPACE}\d{{3}}", text) for text in texts)
    watched.check()


def test_forms() -> None:
    assert column_form(0) == f"%'{SPACE},.0f"
    assert column_form(2, "+") == f"%+'{SPACE},.2f"
    assert typeset_form("{:+.1%}")(-0.0512) == f"−5.1{SPACE}%"
    assert typeset_form("{:,.0f}")(7_868_672) == f"7{SPACE}868{SPACE}672"
