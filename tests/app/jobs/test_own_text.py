"""Own text on the Text page: the run's model reads it at once, and nothing is saved unless the user saves it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.browser_pages import Watched

from twell.analysis.neurons.at_token import neurons_at
from twell.app.jobs.own_text import LONGEST
from twell.app.jobs.runner import Job, JobRunner, model_of
from twell.workbench.errors import UserError
from twell.workbench.run.store import Run, open_run

WHILE_READING = 120_000  # ms: a process with torch starts, on a busy machine


def test_the_model_is_at_hand_only_if_it_is_the_same(made: ModuleType, made_run: Run, tmp_path: Path) -> None:
    assert model_of(made_run) is None
    run = open_run(made.bundled(tmp_path) / "tiny")
    model = model_of(run)
    assert model is not None
    assert model[0].endswith("demo-model")
    run.manifest.model["d_model"] = 128
    assert model_of(run) is None


def test_a_job_that_fails_says_why_and_one_runs_at_a_time(tmp_path: Path) -> None:
    runner = JobRunner()
    job = runner.start("a measurement", tmp_path / "t.parquet", "run", ["bench", "--nonsense"], cases=1)
    os.kill(job.process.pid, signal.SIGSTOP)  # it would end at once
    try:
        with pytest.raises(UserError, match="one is running"):
            runner.start("a measurement", tmp_path, "two", [], cases=1)
    finally:
        os.kill(job.process.pid, signal.SIGCONT)
    assert runner.job is job
    for _ in range(600):
        if not job.running:
            break
        time.sleep(0.1)
    failure = job.failure()
    assert failure is not None
    assert "--nonsense" in failure
    runner.clear()
    assert runner.job is None


def test_a_job_that_is_stopped_at_once_says_so(tmp_path: Path) -> None:
    job = JobRunner().start("a measurement", tmp_path / "t.parquet", "run", ["bench", "builtin:demo"], cases=1)
    job.stop()
    job.process.wait(60)
    assert job.failure() == "Stopped before anything was recorded."


def test_a_job_that_does_not_end_when_told_is_killed_the_second_time(tmp_path: Path) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(15)"
    with subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()  # it does not hear any more
        job = Job("a measurement", tmp_path, "run", 1, process, tempfile.TemporaryDirectory())
        job.stop()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        job.stop()
        assert process.wait(10) == -signal.SIGKILL
    assert job.failure() == "Stopped before anything was recorded."


def test_own_text_is_read_and_saved_only_when_asked(
    bundled_run: Path, growing_page: Watched, new_page: Callable[..., Any]
) -> None:
    page = growing_page.page
    growing_page.open("/text?run=tiny&neuron=L3/N42", ".tw-passage")
    page.get_by_role("button", name="Your own text").click()
    page.wait_for_url("**write=True*")  # the address says that the field is open, also while the run grows
    text = page.get_by_label("Text", exact=True)
    text.fill("long " * (LONGEST // 5) + "!")
    page.get_by_role("button", name="Read it").click()
    page.wait_for_selector("text=shorten it")
    assert len(text.input_value()) == LONGEST + 1
    text.fill("A lichen <script>window.twellHurt=1</script> lives here.\n\nשלום")
    page.get_by_role("spinbutton", name="Continue it by").fill("8")
    page.get_by_role("button", name="Read it").click()
    page.wait_for_selector(".tw-passage:has-text('lichen')", timeout=WHILE_READING)
    growing_page.settle()
    assert "own=" in page.url and "neuron=L3%2FN42" in page.url and "write" not in page.url
    assert "<script>window" in page.locator(".tw-passage").inner_text()
    assert page.evaluate("window.twellHurt") is None
    assert page.locator(".tw-passage a.made").count() == 8, "tokens that the model wrote are told apart"
    assert [path.name for path in bundled_run.parent.iterdir()] == ["tiny"], "nothing is saved by itself"
    link = page.url
    page.locator(".tw-passage a.t").nth(3).click()
    page.wait_for_selector(".tw-neurons a")
    growing_page.settle()
    page.get_by_role("button", name="Save as a run").click()
    page.wait_for_url("**run=own-a-lichen-*&scale=tiny")
    page.wait_for_selector(".tw-passage:has-text('lichen')")
    (run,) = [open_run(path) for path in bundled_run.parent.iterdir() if path.name.startswith("own-")]
    assert run.manifest.status == "complete"
    assert len(neurons_at(run, 0, 3)) == int(
        run.activity().query("position == 3").filter(like="nnz_").sum(axis=1).iloc[0]
    )
    other = Watched(new_page(), growing_page.address)
    other.open(link.removeprefix(growing_page.address), ".tw-passage:has-text('lichen')")
    other.page.get_by_role("button", name="Back to the run's text").click()
    other.page.wait_for_url("**/text?run=tiny**")
    other.check()
    growing_page.check()


def test_a_link_to_a_text_that_is_gone_says_so(show: Callable[..., Any], made: ModuleType, tmp_path: Path) -> None:
    test = show(made.bundled(tmp_path), "text", run="tiny", own="0123456789abcdef")
    assert not test.exception
    assert "this one is gone" in test.warning[0].value.replace("\\", "")
    assert "Sequence 0" in "\n".join(str(element.proto.body) for element in test.get("html"))
