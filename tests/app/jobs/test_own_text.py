"""Own text on the Text page: the run's model reads it in a process of its own, and the page goes where it lies."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from twell.app.jobs.own_text import LONGEST
from twell.app.jobs.runner import OWN, JobRunner, model_of
from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run, open_run


def bundled(made: ModuleType, folder: Path) -> Path:
    """A folder with a run that says it is of the bundled model."""
    run = made.make(folder / "tiny", layers=8, d_ff=768, sequences=10)
    manifests.update(run.path, model={**run.manifest.model, "name": "demo-model", "d_model": 256})
    return folder


def test_the_model_is_at_hand_only_if_it_is_the_same(made: ModuleType, made_run: Run, tmp_path: Path) -> None:
    assert model_of(made_run) is None
    run = open_run(bundled(made, tmp_path) / "tiny")
    found = model_of(run)
    assert found is not None
    assert found[0].endswith("demo-model")
    run.manifest.model["d_model"] = 128
    assert model_of(run) is None


def test_a_job_that_fails_says_why_and_one_runs_at_a_time(tmp_path: Path) -> None:
    runner = JobRunner()
    job = runner.start(
        "own text", tmp_path / "own", "own", ["capture", str(tmp_path / "no-model"), "--text", OWN], "words"
    )
    with pytest.raises(UserError, match="one is running"):
        runner.start("own text", tmp_path / "two", "two", [], "words")
    for _ in range(600):
        if not job.running:
            break
        time.sleep(0.1)
    failure = job.failure()
    assert failure is not None
    assert "no-model" in failure
    assert not (tmp_path / "own").exists()
    runner.clear()
    assert runner.job is None


def test_own_text_is_read_by_the_model_and_opens(
    browser: Any, serve: Callable[[Path], str], watch: Any, made: ModuleType, tmp_path: Path
) -> None:
    watched = watch(browser.new_page(), serve(bundled(made, tmp_path)))
    page, other = watched.page, watch(browser.new_page(), watched.address)
    other.open("/text?run=tiny", ".tw-passage")
    watched.open("/text?run=tiny", ".tw-passage")
    page.get_by_role("button", name="Your own text").click()
    text = page.get_by_label("Text", exact=True)
    text.fill("long " * (LONGEST // 5) + "!")
    page.get_by_role("button", name="Capture text").click()
    page.wait_for_selector("text=shorten it")
    assert len(text.input_value()) == LONGEST + 1
    text.fill("A lichen <script>window.twellHurt=1</script> lives here.\n\nשלום")
    page.get_by_role("button", name="Capture text").click()
    page.wait_for_selector(".st-key-job")
    other.open("/text?run=tiny", ".st-key-job")
    page.wait_for_url("**run=own-a-lichen-*&scale=tiny", timeout=120_000)
    page.wait_for_selector(".tw-passage:has-text('lichen')")
    watched.settle()
    assert "<script>window" in page.locator(".tw-passage").inner_text()
    assert page.evaluate("window.twellHurt") is None
    (run,) = [open_run(path) for path in tmp_path.iterdir() if path.name.startswith("own-")]
    assert run.manifest.status == "complete"
    assert run.frame("sequences")["source"].tolist() == ["own-text.txt"]
    watched.check()
    other.page.wait_for_selector(".st-key-job", state="detached")
    assert other.page.url.endswith("run=tiny"), "one tab's own text took another tab away"
    page.get_by_role("button", name="Your own text").click()
    text.fill("Moss, too.")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".st-key-job")
    page.close()
    other.page.get_by_text("Open it →").click(timeout=120_000)
    other.page.wait_for_selector(".tw-passage:has-text('Moss')")
    other.check()


def test_the_dashboard_never_loads_torch() -> None:
    """In a process of its own, since other tests of this one may have."""
    code = "import sys, twell.app.jobs.own_text, twell.app.text.passage_view; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"


def test_a_job_that_is_stopped_at_once_leaves_nothing(made: ModuleType, tmp_path: Path) -> None:
    found = model_of(open_run(bundled(made, tmp_path) / "tiny"))
    assert found is not None
    runner = JobRunner()
    job = runner.start("own text", tmp_path / "own", "own", ["capture", found[0], "--text", OWN], "words " * 2000)
    job.stop()
    job.process.wait(60)
    assert job.failure() == "Stopped before anything was recorded."
    assert not (tmp_path / "own").exists()
