"""The dashboard on what the project itself makes: the demo run, and a capture that goes on beside the open page."""

from __future__ import annotations

import io
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.browser_pages import wait_until

from twell.analysis import by_token, contexts, examples
from twell.analysis.figures.speed.live import sparse_calls
from twell.app.tokens.token_neurons import neurons_of
from twell.app.ui.formatting import number, visible, whole
from twell.app.ui.run_cache import LiveRun
from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.part_files import LIVE
from twell.workbench.run.store import Run, open_run

CALLS = ".st-key-calls .js-plotly-plot"
STATES = 3  # of the capture that the open page shows before it is stopped, one a second or so

# Notes when the figure of calls first shows how many batches, by the clock that files are stamped with.
NOTICE = """figure => {
    window.drawn = {};
    setInterval(() => {
        const many = document.querySelector(figure)?._fullData?.[0]?._length;
        if (many && !(many in window.drawn)) window.drawn[many] = Date.now() / 1000;
    }, 10);
}"""


class Watcher(threading.Thread):
    """Notes every state of a run that times its calls: `written[batches]` is the time stamp of the file with them."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self.path, self.over = run, threading.Event()
        self.written: dict[int, float] = {}

    def run(self) -> None:
        seen = 0
        while not self.over.wait(0.005):
            try:
                stamp = (self.path / LIVE).stat().st_mtime_ns
                if stamp == seen:
                    continue
                run = open_run(self.path)
                many = batches(LiveRun(run.path, run.manifest))
            except (OSError, UserError):
                continue  # not begun yet
            seen = stamp
            self.written.setdefault(many, stamp / 1e9)


def timed(page: Any, watcher: Watcher) -> list[float]:
    """Return the seconds from file to screen of the states seen in both, without the first, which was there."""
    drawn = {int(many): float(at) for many, at in page.evaluate("window.drawn").items()}
    return [drawn[many] - watcher.written[many] for many in sorted(drawn)[1:] if many in watcher.written]


def batches(run: Run) -> int:
    """Return how many batches the figure of calls has."""
    return int((sparse_calls(run)["layer"] == 0).sum())


def waited() -> float:
    """How many times longer work takes now than it would on a processor of its own."""
    began, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < 0.1:
        pass
    return (time.monotonic() - began) / 0.1


@pytest.mark.timeout(600)
def test_parts_of_a_capture_appear_on_the_open_page(
    new_page: Callable[..., Any], growing: tuple[Path, str], watch: Any, tmp_path: Path
) -> None:
    """`twell capture` from its first batches until it is stopped, with the Kernels page open beside it."""
    (runs, address), printed, text = growing, tmp_path / "printed.txt", tmp_path / "text.jsonl"
    watched = watch(new_page(), address)
    watched.open("/", ".tw-title, .tw-numbers")
    passages = resources.files("twell.data").joinpath("passages.jsonl").read_text(encoding="utf-8")
    text.write_text(passages * 100, encoding="utf-8")  # more than is read in minutes
    model, watcher = str(resources.files("twell.data") / "demo-model"), Watcher(runs / "live")
    line = [sys.executable, "-m", "twell.workbench", "capture", model, "--text", str(text)]
    line += ["--batch-tokens", "512", "--timings", "8", "--timings-share", "1", "--out", str(runs / "live")]
    with printed.open("wb") as log:
        capture = subprocess.Popen(line, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        watcher.start()
        while max(watcher.written, default=0) < 2:
            assert capture.poll() is None, printed.read_text()
            watcher.join(0.1)
        watched.open("/kernels?run=live", CALLS)
        watched.page.evaluate(NOTICE, CALLS)
        assert watched.page.locator(".tw-mark.live").count() == 1
        shares = []
        while len(timed(watched.page, watcher)) < STATES:
            assert capture.poll() is None, printed.read_text()
            shares.append(waited())
            watched.page.wait_for_timeout(1_000)
        capture.terminate()
        assert capture.wait(60) == 130, printed.read_text()
    finally:
        capture.kill()
    watched.page.wait_for_selector(".tw-mark.live", state="detached")
    watcher.over.set()
    ended = open_run(runs / "live")
    assert ended.manifest.status == manifests.INTERRUPTED
    wait_until(watched.page, "many => window.drawn[many]", arg=batches(ended))
    took = timed(watched.page, watcher)
    print("seconds from a file to the screen:", *(f"{one:.2f}" for one in took))
    assert min(took) > 0, "the page cannot show what is not there yet"
    busy = min(max(1.0, statistics.median(shares)), 5.0)
    room = 0.5 + 1.5 * busy  # 2 s of processors that have nothing else to do, of which up to 0.5 are waiting, not work
    print(f"all work took {busy:.1f} times as long as alone: up to {room:.1f} s are right")
    assert statistics.median(took) < room, took
    assert max(took) < 2 * room, took
    watched.check()


def saved(page: Any, name: str, within: str) -> bytes:
    """The file that a button of a part of the page saves."""
    with page.expect_download() as waiting:
        page.locator(within).get_by_role("button", name=name).click()
    return Path(waiting.value.path()).read_bytes()


@pytest.mark.timeout(900)
def test_from_a_token_to_its_places_its_neurons_and_away_with_the_table(
    new_page: Callable[..., Any], demo_address: str, watch: Any, demo: Path, notebook: Callable[[str], pd.DataFrame]
) -> None:
    """On the demo run: Tokens, a token, its contexts, one of its neurons, the neuron's examples, Export."""
    run = open_run(demo)
    watched = watch(new_page(), demo_address)
    page = watched.page

    watched.open("/tokens?run=demo&view=tokens&rank=shrunk", ".st-key-ranking .js-plotly-plot")
    page.get_by_role("textbox", name="Search").fill("ING")
    page.keyboard.press("Enter")
    page.wait_for_url("**find=ING*")
    page.get_by_role("spinbutton", name="Minimum count").fill("5")
    page.keyboard.press("Enter")
    page.wait_for_url("**least=5*")
    watched.settle()
    seldom = by_token(run, min_count=5)  # as the page ranks
    wanted = seldom[seldom["text"].str.contains("ing", case=False, regex=False)].reset_index(drop=True)
    assert 0 < len(wanted) < len(seldom)
    page.locator(".st-key-every-token-data button").click()
    filtered = pd.read_parquet(io.BytesIO(saved(page, "Save as Parquet", "body")))
    pd.testing.assert_frame_equal(filtered, wanted, check_dtype=False)
    page.keyboard.press("Escape")
    page.locator(".st-key-every-token-code button").click()
    made = notebook(page.locator('[data-testid="stCode"]').inner_text())
    pd.testing.assert_frame_equal(made.reset_index(drop=True), wanted)

    watched.open("/tokens?run=demo&view=tokens&rank=shrunk", ".st-key-ranking .js-plotly-plot")
    tokens = by_token(run, min_count=20)
    loudest = tokens.iloc[0]
    page.locator(".js-plotly-plot .scatterlayer .point").first.click(force=True)
    page.wait_for_selector(".tw-places")
    watched.settle()
    assert f"token={loudest['token_id']}" in page.url
    assert page.locator("h1").inner_text().startswith(visible(loudest["text"]))

    places = contexts(run, int(loudest["token_id"]), limit=50, order="loudest")
    lines_shown = page.locator(".tw-place:not(.names)")
    assert lines_shown.count() == len(places)
    assert [where.inner_text() for where in lines_shown.locator(".where").all()] == [
        f"{row.sequence}:{row.position}" for row in places.itertuples()
    ]
    assert [cell.inner_text() for cell in lines_shown.locator(".nnz").all()] == [whole(nnz) for nnz in places["nnz"]]

    at = places.iloc[0]
    page.evaluate("window.stays = true")
    lines_shown.first.locator("a.where").click()
    page.wait_for_selector(".tw-passage a.here")
    watched.settle()
    assert page.evaluate("window.stays"), "a link of our own is followed in place"
    assert f"sequence={at['sequence']}&position={at['position']}" in page.url
    assert page.locator(".tw-passage a.here").inner_text().strip() == str(loudest["text"]).strip()
    page.go_back()
    page.wait_for_selector(".tw-places")
    watched.settle()
    page.get_by_text("Least active first").click()
    wait_until(page, "location.search.includes('order=quietest')")
    link = page.url
    page.get_by_role("link", name="← All tokens").click()
    page.wait_for_selector('[data-testid="stDataFrame"]')
    watched.settle()
    assert "rank=shrunk" in page.url
    page.go_back()
    page.locator(".st-key-fired-neurons a.tw-neuron").first.wait_for(timeout=120_000)  # the model reads, once started
    watched.settle()
    assert page.url == link
    there = contexts(run, int(loudest["token_id"]), limit=100, order="text")
    read = there["sequence"].isin(there["sequence"].drop_duplicates().head(3)).sum()
    every = page.locator(".st-key-fired-neurons a.tw-neuron").all_inner_texts()
    assert len(every) == 20 and all(f"of {read} places" in line for line in every), "of the passages that it read"

    own = neurons_of(run, int(loudest["token_id"]))
    links = page.locator(".st-key-example-neurons a.tw-neuron")
    assert [link.locator(".name").inner_text() for link in links.all()] == own["label"].head(links.count()).tolist()
    assert links.count() > 0
    label = own["label"].iloc[0]
    links.first.click()
    page.wait_for_selector(".tw-example")
    watched.settle()
    assert page.locator("h1").inner_text().startswith(f"{label}: ")

    layer, neuron = (int(word[1:]) for word in label.split("/"))
    kept = examples(run, layer, neuron)
    lines = page.locator(".tw-example")
    assert [line.locator(".number").last.inner_text() for line in lines.all()] == [
        number(value) for kind in ("top", "sample") for value in kept.loc[kept["kind"] == kind, "value"]
    ]
    marked = lines.first.locator(".here").inner_text()
    assert marked.strip() in kept["token"].iloc[0]
    page.locator(".st-key-in-the-text-data button").click()
    table = pd.read_parquet(io.BytesIO(saved(page, "Save as Parquet", "body")))
    pd.testing.assert_frame_equal(table, kept, check_dtype=False)
    page.keyboard.press("Escape")

    page.get_by_role("link", name="Export").click()
    page.wait_for_url("**/export?run=demo*")
    watched.settle()
    watched.open("/export?run=demo&table=by_token", '[data-testid="stDataFrame"]')
    whole_table = by_token(run)
    exported = pd.read_parquet(io.BytesIO(saved(page, "Save as Parquet", ".st-key-one")))
    pd.testing.assert_frame_equal(exported, whole_table, check_dtype=False)
    text = pd.read_csv(io.BytesIO(saved(page, "Save as CSV", ".st-key-one")), keep_default_na=False)
    assert text["text"].tolist() == whole_table["text"].tolist()
    assert text["count"].tolist() == whole_table["count"].tolist()
    np.testing.assert_allclose(text["z"], whole_table["z"])
    watched.check()
