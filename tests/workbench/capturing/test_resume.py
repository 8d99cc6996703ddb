"""Runs that are killed and go on, against runs that were not; test_killed.py has processes that are. Cost: 20 s."""

from __future__ import annotations

import gzip
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.captures import save_model
from support.same_runs import assert_same_run

from twell.workbench import cli
from twell.workbench.capturing.command import capture, record
from twell.workbench.capturing.recorder import Recorder
from twell.workbench.capturing.resume import ResumePoint
from twell.workbench.errors import UserError
from twell.workbench.models.load import load
from twell.workbench.options import CaptureOptions, DemoOptions
from twell.workbench.run import manifest as manifests
from twell.workbench.run import writer
from twell.workbench.run.checks.unfinished import set_aside
from twell.workbench.run.schema import nnz_columns
from twell.workbench.run.store import open_run
from twell.workbench.text import batches
from twell.workbench.text import sequences as text_module
from twell.workbench.text.sources import open_sources


class Killed(BaseException):
    """What stands for kill -9: nothing is written after it."""


def options(folder: Path, out: Path, text: tuple[str, ...], **given: Any) -> CaptureOptions:
    fields: dict[str, Any] = {"batch_tokens": 24, "seq_len": 24, "timings": 0, "device": "cpu", "examples": 2, **given}
    return CaptureOptions(model=str(folder), text=text, out=out, **{"kernel": "reference", "fired": "1:0.3", **fields})


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Kill the capture at the so-many-th file that it puts in its place from now on."""
    replace, left = os.replace, [0]

    def dying(source: Any, target: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        replace(source, target)

    monkeypatch.setattr(os, "replace", dying)
    return lambda files: left.__setitem__(0, files)


@pytest.mark.parametrize("given", [{}, {"generate": 5, "batch_tokens": 48}])
def test_killed_at_any_file(
    given: dict[str, Any],
    tiny: Path,
    tmp_path: Path,
    texts: tuple[str, ...],
    killing: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer, "PART_TOKENS", 20)
    monkeypatch.setattr(batches, "WINDOW", 2)
    killing(1000)
    whole = capture(options(tiny, tmp_path / "whole", texts, **given))
    assert len(whole.parts("activity")) > 4
    tokens = set()
    for files in random.Random(1).sample(range(14), 14):  # of a part and its manifest, each file once
        killing(files)
        with pytest.raises(Killed):
            capture(options(tiny, tmp_path / "run", texts, resume=True, **given))
        if (tmp_path / "run" / "run.json").exists():
            tokens.add(open_run(tmp_path / "run").manifest.tokens)  # readable, whatever happened
    assert len(tokens) > 2
    killing(1000)
    capture(options(tiny, tmp_path / "run", texts, resume=True, **given))
    assert_same_run(open_run(tmp_path / "run"), whole)


@pytest.fixture
def begun(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], killing: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> CaptureOptions:
    """Kill a capture in its midst; return the options that resume it."""
    monkeypatch.setattr(writer, "PART_TOKENS", 20)
    monkeypatch.setattr(batches, "WINDOW", 2)
    given = tuple(shutil.copy(path, tmp_path) for path in texts)
    killing(40)
    with pytest.raises(Killed):
        capture(options(tiny, tmp_path / "run", given))
    killing(1000)
    assert open_run(tmp_path / "run").manifest.tokens > 60
    return options(tiny, tmp_path / "run", given, resume=True)


def refused(chosen: CaptureOptions, *words: str) -> None:
    before = {path: path.read_bytes() for path in chosen.out.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as error:
        capture(chosen)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert {path: path.read_bytes() for path in chosen.out.rglob("*") if path.is_file()} == before


@contextmanager
def recorded_elsewhere(folder: Path) -> Iterator[None]:
    """Have another process hold a run's folder, as one that records it does, and die at the block's end."""
    code = (
        "import fcntl, os, sys; handle = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(handle, fcntl.LOCK_EX)\n"
        "print('has it', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "has it\n"
        yield
        other.kill()


def test_a_run_that_is_being_recorded_is_left_alone(begun: CaptureOptions) -> None:
    """From the reading of its manifest on, by another process, until that one ends, however it does."""
    with recorded_elsewhere(begun.out):
        refused(begun, "another capture is writing to it")
        refused(replace(begun, model="nobody/asked-for-this-first"), "another capture is writing to it")
        refused(replace(begun, resume=False), "another capture is writing to it", "wait for its end")
    assert capture(begun).manifest.status == "complete"


def test_a_capture_that_began_while_the_model_was_loaded_is_left_alone(begun: CaptureOptions) -> None:
    loaded, chosen = load(begun.model, device="cpu", kernel="reference"), replace(begun, resume=False)
    with recorded_elsewhere(begun.out), pytest.raises(UserError, match="another capture is writing to it"):
        record(loaded, chosen, open_sources(chosen.text), quiet=True)


def test_a_demo_leaves_the_one_that_is_being_recorded_alone(
    begun: CaptureOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And moves one that nothing records any more, whole."""
    monkeypatch.setattr(cli, "DEMO_TOKENS", 100)  # of the demo that would take its place
    tokens = open_run(begun.out).manifest.tokens
    with recorded_elsewhere(begun.out), pytest.raises(UserError, match="another capture is writing to it"):
        cli.demo(DemoOptions(out=begun.out, app=False))
    assert [path.name for path in begun.out.parent.iterdir() if path.is_dir()] == [begun.out.name]
    moved = set_aside(begun.out, "recording")
    assert not begun.out.exists()
    assert open_run(moved).manifest.tokens == tokens


def test_a_capture_has_its_folder_to_itself(
    tiny: Path, tmp_path: Path, texts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, step, messages = options(tiny, tmp_path / "run", texts, resume=True), Recorder.step, []

    def meddled(self: Recorder, batch: Any) -> None:
        if not messages:
            with pytest.raises(UserError) as error:
                capture(chosen)
            messages.append(str(error.value))
        step(self, batch)

    monkeypatch.setattr(Recorder, "step", meddled)
    run = capture(chosen)
    assert "another capture is writing to it" in messages[0]
    monkeypatch.setattr(Recorder, "step", step)
    assert_same_run(run, capture(options(tiny, tmp_path / "whole", texts)))


def test_the_outcome_is_told_of_the_whole_run(begun: CaptureOptions, capsys: pytest.CaptureFixture[str]) -> None:
    manifests.update(begun.out, seconds=1000.0)
    run = capture(begun)
    assert run.manifest.seconds > 1000
    counts = run.activity(flagged=False)[nnz_columns(run.layers)].to_numpy()
    assert f"mean nnz {counts.mean():.1f} of {run.d_ff}" in capsys.readouterr().out.splitlines()[-1]


def test_a_run_of_before_values_were_counted_goes_on_without(begun: CaptureOptions) -> None:
    """Counts of some of its tokens would not add up to the firings of its neurons."""
    parts = open_run(begun.out).manifest.parts
    manifests.update(begun.out, parts=[part for part in parts if part.table != "value_bins"])
    run = capture(begun)
    assert run.has("examples") and not run.has("value_bins")


def test_a_resumed_run_is_being_recorded_again(begun: CaptureOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    manifests.update(begun.out, status=manifests.INTERRUPTED)
    seen, step = set(), Recorder.step

    def noted(recorder: Recorder, batch: batches.Batch) -> None:
        seen.add(open_run(begun.out).manifest.status)
        step(recorder, batch)

    monkeypatch.setattr(Recorder, "step", noted)
    assert capture(begun).manifest.status == manifests.COMPLETE
    assert seen == {manifests.RECORDING}


def test_a_damaged_file_in_the_middle_of_a_list_loses_nothing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_module, "BATCH", 1)  # characters tokenised at a time: no reading ahead
    monkeypatch.setattr(batches, "WINDOW", 2)
    paths = [tmp_path / name for name in ("first.txt", "second.txt.gz", "third.txt")]
    written = [f"{name} has the ferry wait, and the gulls. " * 12 for name in ("One", "Two", "Three")]
    for path, one in zip(paths, written, strict=True):
        path.write_bytes(gzip.compress(one.encode()) if path.suffix == ".gz" else one.encode())
    names = tuple(map(str, paths))
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[:-12])
    with pytest.raises(UserError, match=r"Expected to read .*second.txt.gz, got an error"):
        capture(options(tiny, tmp_path / "run", names))
    run = open_run(tmp_path / "run")
    assert run.manifest.status == "interrupted"
    assert len(run.activity()) == run.manifest.tokens > 200
    paths[1].write_bytes(whole)
    capture(options(tiny, tmp_path / "run", names, resume=True))
    assert_same_run(open_run(tmp_path / "run"), capture(options(tiny, tmp_path / "whole", names)))


def test_other_options_are_named(begun: CaptureOptions, tmp_path: Path) -> None:
    refused(replace(begun, seq_len=20), "--seq-len", "20 now", "24 then")
    refused(replace(begun, loss=False), "--loss")
    refused(replace(begun, text=begun.text[:2]), "--text")
    refused(replace(begun, resume=False), "already holds a run that has no end yet", "with --resume to go on with it")
    refused(replace(begun, model=str(save_model(tmp_path / "tiny-llama", initializer_range=0.3))), "model (weights)")
    Path(begun.text[1]).write_text("def count(columns): pass", encoding="utf-8")
    refused(begun, "document 0", begun.text[1])


def test_a_run_folder_that_cannot_be_read(begun: CaptureOptions) -> None:
    """From a newer version, and with its manifest cut short: not gone on with, and left as it is."""
    path = begun.out / "run.json"
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole.replace('"schema_version": 1', '"schema_version": 9'), encoding="utf-8")
    refused(begun, "of schema version 1 or older", "got version 9", "update twell-workbench")
    path.write_text(whole[: len(whole) // 2], encoding="utf-8")
    refused(begun, "Expected a readable manifest at", "copy the run again")
    path.write_text(whole, encoding="utf-8")
    assert capture(begun).manifest.status == "complete"


@pytest.mark.parametrize("harm", ["cut", "missing", "empty"])
@pytest.mark.parametrize("table", ["activity", "neurons"])
def test_a_damaged_part_is_named(begun: CaptureOptions, table: str, harm: str) -> None:
    """Of rows that are read again and of sums that are not: both would be in the run that goes on."""
    part = next(part for part in open_run(begun.out).manifest.parts if part.table == table)
    path = begun.out / part.file
    whole = path.read_bytes()
    path.unlink() if harm == "missing" else path.write_bytes(whole[: len(whole) // 2 if harm == "cut" else 0])
    says = f"{part.file} is missing" if harm == "missing" else f"{part.file} differs from its checksum"
    refused(begun, says, "copy it again from where it was recorded")
    path.write_bytes(whole)
    assert capture(begun).manifest.status == "complete"


def test_a_text_that_ends_too_soon(begun: CaptureOptions) -> None:
    first = Path(begun.text[0])
    text = first.read_text(encoding="utf-8")
    first.write_text(text[: len(text) // 2], encoding="utf-8")
    refused(begun, "document 0")
    point = ResumePoint(open_run(begun.out))
    with pytest.raises(UserError, match=f"only 0 of its {point.sequences} sequences: give the same --text"):
        list(point.skip_recorded([]))


def test_a_complete_run_has_nothing_left(begun: CaptureOptions, capsys: pytest.CaptureFixture[str]) -> None:
    run = capture(begun)
    again = capture(begun)
    assert "is complete" in capsys.readouterr().out
    for given, word in (
        ({"model": "builtin:demo"}, "another model (name) ('builtin:demo' now"),
        ({"text": begun.text[:1]}, "another --text"),
        ({"tokens": 7}, "another --tokens (7 now, None then)"),
        ({"threshold": 0.5}, "another --threshold"),
    ):
        refused(replace(begun, **given), word, "choose another --out")
    np.testing.assert_array_equal(again.activity()["token_id"], run.activity()["token_id"])
