"""The picture of a figure carries what it shows and the address that leads back; copying gives both."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from support.browser_pages import wait_until

COPIED = """async () => {
  const items = await navigator.clipboard.read();
  const text = await (await items[0].getType("text/plain")).text();
  return [items[0].types, text];
}"""


def chunks(image: bytes) -> dict[str, list[bytes]]:
    """The chunks of a PNG by type, each with a right checksum."""
    result: dict[str, list[bytes]] = {}
    at = 8
    while at < len(image):
        (size,) = struct.unpack(">I", image[at : at + 4])
        kind, body = image[at + 4 : at + 8], image[at + 8 : at + 8 + size]
        assert struct.unpack(">I", image[at + 8 + size : at + 12 + size])[0] == zlib.crc32(kind + body)
        result.setdefault(kind.decode(), []).append(body)
        at += 12 + size
    return result


def test_a_picture_carries_its_address(watched: Any) -> None:
    page = watched.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    watched.open("/layers?run=made", ".js-plotly-plot .main-svg")
    menu = page.locator(".tw-picture").first
    menu.locator("summary").press("Enter")
    saved = {}
    for name in ("PNG", "SVG"):
        with page.expect_download() as waiting:
            menu.get_by_role("button", name=f"Save {name}").click()
        assert waiting.value.suggested_filename == f"made-Activity-by-layer.{name.lower()}"
        saved[name] = Path(waiting.value.path()).read_bytes()
    address = page.url
    assert "run=made" in address
    root = ElementTree.fromstring(saved["SVG"])
    texts = ["".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"Activity by layer", "Run made", address, "L0"} <= set(texts)
    assert not [one for one in root.iter() if one.tag.endswith(("script", "foreignObject"))]
    metadata = chunks(saved["PNG"])["iTXt"]
    assert metadata == [b"Title\0\0\0\0\0Activity by layer", b"Source\0\0\0\0\0" + address.encode()]
    menu.get_by_role("button", name="Copy picture and address").click()
    wait_until(page, "() => document.querySelector('.tw-picture output').textContent.startsWith('Copied')")
    assert page.evaluate(COPIED) == [["text/plain", "image/png"], address]
    menu.get_by_role("button", name="Copy address").click()
    wait_until(page, "() => document.querySelector('.tw-picture output').textContent === 'Copied.'")
    assert page.evaluate("navigator.clipboard.readText()") == address
    watched.check()


def test_a_title_of_markup_stays_text(watched: Any) -> None:
    """What a heading holds becomes text of the SVG, whatever it looks like."""
    page, hostile = watched.page, "</text><script>alert(1)</script>&\"'"
    watched.open("/layers?run=made", ".js-plotly-plot .main-svg")
    page.evaluate(f"document.querySelector('.tw-figure h2').textContent = {json.dumps(hostile)}")
    menu = page.locator(".tw-picture").first
    menu.locator("summary").click()
    with page.expect_download() as waiting:
        menu.get_by_role("button", name="Save SVG").click()
    root = ElementTree.fromstring(Path(waiting.value.path()).read_bytes())
    assert hostile in [element.text for element in root.iter() if element.tag.endswith("text")]
    assert not [one for one in root.iter() if one.tag.endswith("script")]
