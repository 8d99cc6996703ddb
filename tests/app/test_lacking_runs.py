"""What pages say of runs that lack something, are damaged, being recorded or gone, and of addresses of none."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest
from support.copied_runs import copy_run
from support.page_elements import PAGES, drawn, figures, markup, notices

COUNTS = (1, 0, 3, 4, 3, 1, 4, 1, 4, 0)  # figures of a run without single tokens, so without reuse and clusters
Show = Callable[..., AppTest]


def test_a_summary_only_run_says_what_it_cannot_show(show: Show, runs: Path) -> None:
    for page, count in zip(PAGES, COUNTS, strict=True):
        test = show(runs, page, run="summary")
        assert not test.exception
        assert figures(test) == count, page
        assert "keeps sums, counts and timings, but no rows of single tokens" in markup(test)
    listed = markup(show(runs, "tokens", run="summary"))
    assert '<div class="tw-fired-rows bare">' in listed and "for example" not in listed, "no room for a text it lacks"
    assert "for example" in markup(show(runs, "tokens", run="made"))
    token = show(runs, "token", run="summary", token="40")
    assert figures(token) == 1
    assert "in the text; neurons that this token fires." in markup(token)


def test_an_interrupted_run_says_what_it_covers(show: Show, runs: Path) -> None:
    for page in PAGES:
        test = show(runs, page, run="interrupted")
        assert not test.exception
        assert "interrupted</span>" in markup(test)
    assert "timings" in notices(show(runs, "kernels", run="interrupted"))


def test_a_run_without_loss_and_neurons_says_so(show: Show, runs: Path) -> None:
    test = show(runs, run="counts")
    assert not test.exception
    assert "not recorded" in markup(test)
    layers = show(runs, "layers", run="counts")
    assert figures(layers) == 2  # activity, and layers against each other
    assert re.search(r"Left out: [^<]*activity and surprise[;.][^<]* no loss was recorded", markup(layers))
    assert not layers.get("button_group"), "no choice between losses where there is none"


def test_no_speedup_is_claimed_from_the_reference(show: Show, runs: Path) -> None:
    test = show(runs, "kernels", run="oracle")
    assert "no speedup is claimed" in notices(test)
    assert figures(test) == 3
    assert "×" not in drawn(test, 0)
    assert "no speedup is claimed" in markup(show(runs, run="oracle"))


def test_a_recording_run_is_said_to_be_recording(show: Show, recording: Path) -> None:
    for page in PAGES:
        test = show(recording, page)
        assert not test.exception
        assert "tokens so far" in markup(test)


def test_a_broken_part_is_named_and_breaks_no_page(show: Show, runs: Path) -> None:
    for page in ("overview", "tokens", "layers", "positions"):
        test = show(runs, page, run="torn")
        assert not test.exception
        assert "activity/part-00000.parquet" in notices(test)


def test_a_run_that_cannot_be_read_is_named_with_its_reason(show: Show, runs: Path) -> None:
    test = show(runs, run="broken")
    assert not test.exception
    assert "This run cannot be read" in markup(test)
    assert "run.json" in markup(test)


@pytest.mark.parametrize("name", ["gone", "../made", "..", "/etc", "made/../made", "<script>"])
def test_an_address_leads_to_a_run_of_the_folder_or_nowhere(show: Show, runs: Path, name: str) -> None:
    test = show(runs, "layers", run=name)
    assert not test.exception
    assert "There is no such run" in markup(test) and "This run is gone" not in markup(test)
    assert "<script>" not in markup(test)
    assert not figures(test)
    test.selectbox(key="chooser").set_value("made").run()
    assert test.query_params["run"] == "made"
    assert figures(test)


def test_recorded_runs_of_the_package_stand_beside_those_of_the_folder(
    show: Show, runs: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twell.app.ui.run_catalog.recorded_folder", lambda: runs)
    test = show(recording, run="recorded/made")
    assert not test.exception
    assert "came with the package" not in markup(test), "the folder has a run of its own"
    names = test.selectbox(key="chooser").options
    assert names[0] == "live · recording"
    assert "made (bundled)" in names
    assert "summary (bundled) · summary only" in names
    assert figures(test) == 1
    test = show(recording, run="made")
    assert figures(test) == 1
    assert test.query_params["run"] == "recorded/made"


def test_over_an_empty_folder_the_page_says_that_its_run_is_of_the_package(
    show: Show, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twell.app.ui.run_catalog.recorded_folder", lambda: runs)
    page = markup(show(tmp_path, "layers", run="recorded/made"))
    assert f"There is no run in <code>{tmp_path}</code> yet: this one came with the package" in page
    assert f"twell demo --no-app --out {tmp_path / 'demo'}" in page


def test_an_empty_folder_says_how_to_record_a_run(show: Show, tmp_path: Path) -> None:
    test = show(tmp_path)
    assert not test.exception
    assert "No runs yet" in markup(test)
    assert "twell capture" in markup(test)


def test_a_run_deleted_under_an_open_page_is_said_to_be_gone(show: Show, runs: Path, tmp_path: Path) -> None:
    copy_run(runs / "made", tmp_path / "copy")
    copy_run(runs / "oracle", tmp_path / "other")
    test = show(tmp_path, "layers", run="copy")
    assert figures(test) == 5
    shutil.rmtree(tmp_path / "copy")
    test.run()
    assert not test.exception
    assert "This run is gone" in markup(test)


def test_a_newer_schema_is_refused_with_both_versions(show: Show, runs: Path, tmp_path: Path) -> None:
    copy_run(runs / "made", tmp_path / "new")
    manifest = tmp_path / "new" / "run.json"
    manifest.write_text(manifest.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    page_html = markup(show(tmp_path, run="new"))
    assert "version 99" in page_html
    assert "schema version 1" in page_html
