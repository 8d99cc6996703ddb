"""What happens under an open page, in a real browser: parts that break, runs that go, keys instead of a pointer."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.browser_pages import Watched, wait_until
from support.copied_runs import copy_run
from support.servers import remove

from twell.workbench.run import manifest as manifests

GONE, NONE = 'h1:has-text("This run is gone")', 'h1:has-text("There is no such run")'


def add_broken_part(run: Path) -> str:
    """List one more part of activity, cut short; its name."""
    manifest = manifests.read(run)
    part = next(part for part in manifest.parts if part.table == "activity")
    name = "activity/part-00099.parquet"
    (run / name).write_bytes((run / part.file).read_bytes()[:500])
    manifest.parts.append(dataclasses.replace(part, file=name))
    manifest.tokens += part.rows
    manifests.write(run, manifest)
    return name


def test_a_part_that_breaks_and_a_run_that_goes_leave_the_pages_standing(
    new_page: Callable[..., Any], growing: tuple[Path, str], watch: Any, growing_run: Path, runs: Path
) -> None:
    """Two pages stand open on a run that is being recorded, one on a run that is whole."""
    copy_run(runs / "oracle", growing_run / "other")
    live, whole = [watch(new_page(), growing[1]) for _ in range(2)], watch(new_page(), growing[1])
    for watched, path in zip(live, ("layers", "text"), strict=True):
        watched.open(f"/{path}?run=live", ".tw-mark")
    whole.open("/layers?run=other", ".js-plotly-plot")
    name = add_broken_part(growing_run / "live")
    for watched in live:
        watched.page.get_by_text(name).first.wait_for()
    remove(growing_run / "live")
    for watched in live:
        watched.page.wait_for_selector(GONE)
    remove(growing_run / "other")
    whole.page.get_by_role("link", name="Positions").click()
    whole.page.wait_for_selector(".tw-empty")
    for watched in (*live, whole):
        assert watched.page.locator('[data-testid="stException"]').count() == 0
        watched.check()


def test_a_run_that_is_asked_for_before_it_begins_is_shown_once_it_does(
    growing_run: Path, growing_page: Watched
) -> None:
    later = growing_run / "live"
    later.rename(growing_run / "aside")
    growing_page.open("/layers?run=live", NONE)
    (growing_run / "aside").rename(later)
    growing_page.page.wait_for_selector(".js-plotly-plot")
    assert growing_page.page.locator(NONE).count() == 0
    growing_page.check()


def test_a_run_that_ends_without_another_part_is_seen_to_have_ended(growing_run: Path, growing_page: Watched) -> None:
    """The last word of a capture may be its state alone: the parts stay as they are."""
    growing_page.open("/layers?run=live", ".tw-mark.live")
    manifest = manifests.read(growing_run / "live")
    manifest.status = manifests.INTERRUPTED
    manifests.write(growing_run / "live", manifest)
    growing_page.page.get_by_text("The capture stopped before its end").wait_for()
    assert growing_page.page.locator(".tw-mark.live").count() == 0
    growing_page.check()


def test_an_open_page_looks_at_a_growing_run_once_a_second_or_more(
    new_page: Callable[..., Any], growing: tuple[Path, str], watch: Any, growing_run: Path
) -> None:
    """Whatever else the machine does: seconds are the page's own, a look is a message from it."""
    page, sent = new_page(), []
    page.on("websocket", lambda opened: opened.on("framesent", lambda _: sent.append(1)))
    page.clock.install()
    watched = watch(page, growing[1])
    watched.open("/layers?run=live", ".js-plotly-plot")
    before = len(sent)
    page.clock.run_for(4_000)
    page.wait_for_timeout(100)  # until the messages have been noted
    assert len(sent) - before >= 4
    watched.check()


def test_every_choice_is_reached_without_a_pointer(watched: Any) -> None:
    """From the top of the page with Tab: the pages, the run chooser, the token; Enter follows it.

    However late the code comes that draws the links, which leaves their places empty until then.
    """
    page = watched.page

    def delay(route: Any) -> None:
        page.wait_for_selector(".tw-passage")
        page.wait_for_timeout(500)
        route.continue_()

    page.route("**/PageLink.*.js", delay)
    watched.open("/text?run=made&sequence=3", ".tw-passage")
    page.locator("body").press("Tab")
    seen: list[str] = []
    for _ in range(60):
        focused = page.evaluate(
            "(() => { const e = document.activeElement; const s = getComputedStyle(e);"
            "return [e.tagName, e.className, (e.textContent || e.ariaLabel || '').trim().slice(0, 40),"
            "s.outlineStyle !== 'none' || s.boxShadow !== 'none' || s.borderColor] })()"
        )
        seen.append(f"{focused[0]} {focused[2]}")
        if "t" in str(focused[1]).split():
            break
        page.keyboard.press("Tab")
    else:
        raise AssertionError(f"no token was reached: {seen}")
    for name in ("Overview", "Tokens", "Kernels", "Export"):
        assert f"A {name}" in seen
    assert any("Data" in name for name in seen)
    pane = page.evaluate("getComputedStyle(document.activeElement, '::after').display")
    assert pane == "block", "what is known of the token stands beside it"
    page.keyboard.press("Enter")
    page.wait_for_url("**/text?**&position=**")
    page.get_by_role("link", name="This token in the whole run").wait_for()
    watched.settle()  # a link that is drawn anew under the pointer is not followed
    page.get_by_role("link", name="This token in the whole run").click()
    page.wait_for_url("**/token?**")
    watched.check()


def test_started_over_nothing_it_listens_here_alone_and_asks_nobody(
    new_page: Callable[..., Any], growing: tuple[Path, str], watch: Any
) -> None:
    _, address = growing
    port = int(address.rsplit(":", 1)[1])
    listening = {
        line.split()[1].split(":")[0]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].split(":")[1], 16) == port
    }
    assert listening == {socket.inet_aton("127.0.0.1")[::-1].hex().upper()}
    watched = watch(new_page(), address)
    watched.open("/", ".tw-title, .tw-numbers")
    assert watched.page.locator('[data-testid="stException"]').count() == 0
    watched.check()


def test_a_link_opens_what_the_sender_saw(watched: Any, new_page: Callable[..., Any], address: str, watch: Any) -> None:
    page = watched.page
    watched.open("/text?run=made", ".tw-passage")
    page.get_by_role("textbox", name="or by one neuron").fill("L1/N5")
    page.keyboard.press("Enter")
    page.get_by_test_id("stNumberInputStepUp").click()
    wait_until(page, "document.body.innerText.includes('Sequence 1')")
    wait_until(page, "document.querySelector('.tw-scale').innerText.includes('L1/N5')")
    watched.settle()
    link, text = page.url, page.locator(".tw-passage").inner_text()
    assert "neuron=L1%2FN5" in link
    other = watch(new_page(), address)
    other.open(link.removeprefix(address), ".tw-passage")
    assert other.page.locator(".tw-passage").inner_text() == text
    assert "L1/N5" in other.page.locator(".tw-scale").inner_text()
    other.check()
    watched.check()
