"""A study that page What matters starts: how long it says that takes, why it may not, and what stays if it is stopped.

Cost: 60 s, of processes that load torch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from streamlit.testing.v1 import AppTest
from support.browser_pages import Watched
from support.planted_effects import rows_of

from twell.app.jobs.runner import JobRunner
from twell.app.jobs.study import AT_MOST, BATCH_TOKENS, OVER_ALL_LAYERS, START, in_words, seconds, study_arguments
from twell.app.ui.formatting import plural
from twell.workbench.ablations.appended import append
from twell.workbench.ablations.options import AblateOptions
from twell.workbench.ablations.spelled import STUDY, STUDY_WITHOUT_ZEROS, parse
from twell.workbench.errors import UserError
from twell.workbench.run import manifest as manifests
from twell.workbench.run.store import Run, open_run

Show = Callable[..., AppTest]


def studied(folder: Path) -> Run:
    """Let the run `tiny` in a folder be of any weights, so that the bundled model may be measured on its tokens."""
    model = {name: value for name, value in open_run(folder).manifest.model.items() if name != "weights"}
    manifests.update(folder, model=model)
    return open_run(folder)


@pytest.fixture
def tiny(made: ModuleType, tmp_path: Path) -> Run:
    return studied(made.bundled(tmp_path) / "tiny")


def text(test: AppTest) -> str:
    return " ".join(str(block.proto.body) for block in test.get("html"))


def test_what_is_asked_of_twell_ablate_is_what_it_takes(made_run: Run) -> None:
    command, target, *options = study_arguments(made_run, 8000)
    assert (command, open_run(target).manifest) == ("ablate", made_run.manifest)
    flags = {f"--{name.replace('_', '-')}" for name in AblateOptions.__dataclass_fields__}
    assert set(options[::2]) == {"--tokens", "--batch-tokens"} <= flags and options[1] == "8000"
    for threshold, conditions in ((False, STUDY), (True, STUDY_WITHOUT_ZEROS)):
        assert OVER_ALL_LAYERS[threshold] == len(parse(conditions, 8)) - 8, "conditions that are not a layer's FFN"


def test_the_page_says_how_long_it_takes_and_offers_what_takes_two_minutes(
    tiny: Run, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twell.app.jobs.study.TOKENS", (100, 200, 400, 8000))
    monkeypatch.setattr("twell.app.jobs.study.worker", lambda: SimpleNamespace(busy=False))  # other tests share it
    manifests.update(tiny.path, seconds=tiny.manifest.tokens / 50)
    run = open_run(tiny.path)
    assert seconds(run, 200) == pytest.approx(START + 200 * (1 + 22 + 4) / 50) and seconds(run, 200) < AT_MOST
    test = show(tiny.path.parent, "matters", run="tiny")
    assert not test.exception
    assert "200 tokens from all over" in text(test) and "about 2 min at the 50 tokens a second" in text(test)
    assert test.segmented_control(key="study-tokens").options == ["100", "200", "400"]
    test.segmented_control(key="study-tokens").set_value(400).run()
    assert "400 tokens from all over" in text(test) and "about 4 min at the" in text(test)
    assert not test.button(key="study-start").disabled
    assert [in_words(one) for one in (3, 71, 100, 7300)] == ["about 10 s", "about 70 s", "about 2 min", "about 2 h"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"status": "recording"}, "once the capture has ended"),
        ({"summary_only": True}, "keeps no rows of single tokens"),
    ],
)
def test_a_run_that_cannot_be_measured_is_refused(
    tiny: Run, show: Show, change: dict[str, object], reason: str
) -> None:
    manifests.update(tiny.path, **change)
    test = show(tiny.path.parent, "matters", run="tiny")
    assert not test.exception
    assert reason in text(test) and not [button for button in test.button if button.key == "study-start"]


def test_nothing_is_written_where_it_must_not_or_cannot_run(
    tiny: Run, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = lambda: text(show(tiny.path.parent, "matters", run="tiny"))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr("twell.app.jobs.study.os.access", lambda path, mode: path != tiny.path)
        assert f"Expected a run that can be written to, got {tiny.path}" in page()
    with monkeypatch.context() as patch:
        patch.setattr("twell.app.jobs.study.RECORDED", "ti")
        assert "came with the package" in page()

    def lacking() -> None:
        raise UserError("Expected torch and transformers, they are not installed here.")

    with monkeypatch.context() as patch:
        patch.setattr("twell.app.jobs.study.require_torch", lacking)
        assert "Expected torch and transformers" in page()
    with monkeypatch.context() as patch:
        patch.setattr("twell.app.jobs.study.is_busy", lambda: True)
        assert show(tiny.path.parent, "matters", run="tiny").button(key="study-start").disabled


def test_an_error_of_a_study_is_its_sentence(made: ModuleType, tmp_path: Path) -> None:
    run = open_run(made.bundled(tmp_path) / "tiny")  # of no weights that the bundled model has
    job = JobRunner().start("a study", run.path, "tiny", study_arguments(run, 500), cases=0, page="matters")
    assert job.process.wait(120) == 2
    assert str(job.failure()).startswith(f"Expected the weights that {run.path} was recorded with, got others")


def test_a_study_that_is_stopped_keeps_what_it_has_and_goes_on(tiny: Run, show: Show) -> None:
    arguments = [*study_arguments(tiny, 900)[:-1], "64"]
    job = JobRunner().start("a study", tiny.path, "tiny", arguments, cases=0, page="matters")
    while not job.progress()[0] and job.running:
        time.sleep(0.05)
    assert 1 <= job.progress()[0] < job.progress()[1]
    job.stop()
    assert job.process.wait(60) == 130, "as by Ctrl-C"
    assert job.failure() is None and job.has_recorded
    run = open_run(tiny.path)
    (entry,) = run.manifest.effects
    assert not entry["complete"] and 0 < len(set(run.frame("effects")["batch"])) < job.progress()[1]
    page = text(show(tiny.path.parent, "matters", run="tiny"))
    assert f"stopped before all of its {plural(entry['tokens'], 'token')}" in page
    assert "it goes on from there" not in page, "its batches are not those that the page would ask for"
    again = JobRunner().start("a study", tiny.path, "tiny", arguments, cases=0, page="matters")
    assert again.process.wait(120) == 0 and again.failure() is None
    (entry,) = open_run(tiny.path).manifest.effects
    assert entry["complete"]


def test_a_study_of_the_page_that_was_stopped_can_go_on(made: ModuleType, tmp_path: Path, show: Show) -> None:
    run = made.make(tmp_path / "begun", layers=2, sequences=20, timings=0)
    rows = rows_of(np.random.default_rng(0), share=0.5)[0]
    entry = {"study": 0, "tokens": 900, "seconds": 1.0, "complete": False, "batch_tokens": BATCH_TOKENS}
    append(run.path, "effects", rows, effects=[{**entry, "conditions": ["weakest:0.5"]}])
    assert "it goes on from there" in text(show(tmp_path, "matters", run="begun"))


def held(run: Path) -> int:
    """Hold the process that measures a run by SIGSTOP; return its id."""
    while True:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            words = path.read_bytes().split(b"\0")
            if b"ablate" in words and str(run).encode() in words:
                os.kill(int(path.parent.name), signal.SIGSTOP)
                return int(path.parent.name)
        time.sleep(0.05)


def test_a_study_begins_can_be_watched_and_its_figures_are_there_at_once(
    bundled_run: Path, growing_page: Watched
) -> None:
    studied(bundled_run)
    page = growing_page.page
    growing_page.open("/matters?run=tiny", ".st-key-study-start")
    assert page.locator(".js-plotly-plot").count() == 0
    page.get_by_role("button", name="Measure", exact=True).click()
    page.wait_for_selector(".st-key-job")
    process = held(bundled_run)
    try:
        page.get_by_text("One job runs at a time, and a study is running").wait_for()
        assert page.locator(".st-key-study-start button").is_disabled()
        assert page.get_by_role("button", name="Stop").count() == 1
    finally:
        os.kill(process, signal.SIGCONT)
    page.wait_for_selector(".st-key-job", state="detached", timeout=180_000)
    page.wait_for_selector(".js-plotly-plot")
    growing_page.settle()
    assert page.locator('[data-testid="stAlert"]').count() == 0
    assert page.get_by_text("Loss by what is left").count() == 1
    (entry,) = open_run(bundled_run).manifest.effects
    assert entry["complete"] and len(entry["conditions"]) == 30 - ("dead" not in entry["conditions"])
    growing_page.check()
