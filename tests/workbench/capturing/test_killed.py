"""Captures in processes that are killed or interrupted: what is left can be read, and goes on. Cost: 20 s."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pandas as pd
from support.captures import save_model
from support.forked import capture_in_small_parts, capture_until_a_timing, command_line, start
from support.same_runs import assert_same_run

from twell.workbench.capturing.command import capture
from twell.workbench.options import CaptureOptions
from twell.workbench.run.store import open_run


def command(folder: Path, out: Path, errors: Path, part_seconds: float) -> BaseProcess:
    """Capture much text by the command line, in parts of so many seconds."""
    words = ["capture", str(folder), "--text", "builtin:python-docs", "--out", str(out), "--device", "cpu"]
    return start(command_line, words, errors, part_seconds)


def wait_for(condition: Callable[[], bool], process: BaseProcess) -> None:
    """Wait until a condition holds while a process runs."""
    deadline = time.monotonic() + 120
    while not condition():
        assert process.exitcode is None, "the capture ended too soon"
        assert time.monotonic() < deadline, "the capture never began"
        time.sleep(0.01)


def kill(process: BaseProcess) -> None:
    """Send SIGKILL to a process, and see that it died of it."""
    process.kill()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL


def tokens(folder: Path) -> int:
    """Return how many tokens of a run are recorded; -1 before there is a run."""
    return open_run(folder).manifest.tokens if (folder / "run.json").exists() else -1


def test_ctrl_c(tiny: Path, tmp_path: Path) -> None:
    out, errors = tmp_path / "run", tmp_path / "errors.txt"
    process = command(tiny, out, errors, 10)
    wait_for(lambda: any(out.glob("vocab.parquet*")), process)  # it has begun to count
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(60)
    message = errors.read_text()
    assert process.exitcode == 130, message
    assert "Traceback" not in message
    assert "Stopping after the batches in hand" in message
    run = open_run(out)
    assert run.manifest.status == "interrupted"
    assert len(run.activity()) == run.manifest.tokens > 0
    assert run.damaged() == []


def test_kill_9_loses_the_part_in_flight_only(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = command(tiny, out, tmp_path / "errors.txt", 0.1)
    wait_for(lambda: (out / "run.json").exists() and len(list(out.glob("activity/*.parquet"))) > 2, process)
    kill(process)
    run = open_run(out)
    assert run.manifest.status == "recording"
    assert len(run.parts("activity")) >= 2
    assert len(run.activity()) == run.manifest.tokens == run.frame("sequences")["tokens"].sum()
    assert run.damaged() == []


def test_kill_9_and_on(tmp_path: Path) -> None:
    """Twice, at moments of its own choosing, or as often as TWELL_KILLS says."""
    folder, text = save_model(tmp_path / "model"), tmp_path / "long.txt"
    kills, recorded = int(os.environ.get("TWELL_KILLS", "2")), set()
    sentence = "Where the river bends, the ferry waits for nobody. "
    text.write_text(sentence * 200 * kills, encoding="utf-8")  # 8 000 tokens a kill
    given: dict[str, Any] = {"timings": 0, "device": "cpu", "kernel": "reference", "examples": 2, "fired": "1:0.3"}
    options = CaptureOptions(
        model=str(folder), text=(str(text),), out=tmp_path / "run", batch_tokens=256, seq_len=64, resume=True, **given
    )
    generator = random.Random(5)
    for _ in range(kills):
        before = tokens(options.out)
        process = start(capture_in_small_parts, options)
        wait_for(lambda before=before: tokens(options.out) > before, process)  # it goes on
        time.sleep(generator.random() * 0.3)
        kill(process)
        recorded.add(tokens(options.out))
    assert len(recorded) == kills
    assert_same_run(capture(options), capture(replace(options, out=tmp_path / "whole", resume=False)))


def test_killed_in_the_middle_of_a_timing(tiny: Path, tmp_path: Path) -> None:
    """Parts are readable and go together; the run goes on as if nothing had been, and calibrates its device anew."""
    text = tmp_path / "long.txt"
    text.write_text("Where the river bends, the ferry waits for nobody. " * 200, encoding="utf-8")
    options = CaptureOptions(
        model=str(tiny), text=(str(text),), out=tmp_path / "run", batch_tokens=256, seq_len=64, device="cpu",
        kernel="reference", timings_share=1, resume=True,
    )  # fmt: skip
    process = start(capture_until_a_timing, options)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    cut = open_run(options.out)
    assert cut.damaged() == []
    before = cut.frame("timings")
    assert len(before) and cut.manifest.tokens == len(cut.activity()) > 0
    ended = capture(options)
    whole = capture(replace(options, out=tmp_path / "whole", timings=0))
    assert ended.arrow("activity").combine_chunks().equals(whole.arrow("activity").combine_chunks())
    after = ended.frame("timings")
    pd.testing.assert_frame_equal(after[: len(before)], before)
    more = after[len(before) :]
    assert more["batch"].min() > before["batch"].max()
    assert more["seconds"].min() > before["seconds"].max()
    assert set(more.loc[more["op"] == "ffn_dense", "layer"]) == {0, 1, 2}
